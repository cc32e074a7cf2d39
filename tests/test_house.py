"""How the code is built: facts that stand in one place, functions that fit a screen, sentences that read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import truestep
from truestep.config.losses import LossConfig
from truestep.losses import label_losses

ROOT = Path(truestep.__file__).parent
MOST_LINES = 60  # of a function, its decorators counted
# A docstring's first line is a sentence: these words begin a fragment that has to be decoded.
FRAGMENT = re.compile(
    r"(Of|Whether|Which|From|With|Over|Into|Beside|Behind|Between|Until|By|At|On|In|Where|For|To|As)\b"
)


@cache
def sources() -> list[tuple[str, ast.Module]]:
    files = sorted(ROOT.rglob("*.py"))
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in files]


def documented(tree: ast.Module) -> Iterator[tuple[str, str, ast.Constant]]:
    """Each docstring of a module, its name and where it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield getattr(node, "name", "module"), first.value.value, first.value


LOSS_NAMES = frozenset(label_losses._BY_TYPE)


def said_names(tree: ast.Module) -> set[str]:
    """The losses that code names: in a string that is no docstring, or as an identifier."""
    docstrings = {id(node) for _, _, node in documented(tree)}
    # A string that stands alone describes the field above it.
    docstrings |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    classes = {label_losses._BY_TYPE[name].__name__ for name in LOSS_NAMES}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found |= {name for name in LOSS_NAMES if re.search(rf"\b{name}\b", node.value)}
        name = getattr(node, "id", getattr(node, "attr", getattr(node, "name", "")))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias) and name.removesuffix("Loss") in classes:
            found.add(name)
    return found


def test_every_loss_is_known_here() -> None:
    tags = re.findall(r"Tag\(tag='(\w+)'\)", repr(LossConfig)) or re.findall(r"Tag\('(\w+)'\)", repr(LossConfig))
    assert LOSS_NAMES | {"custom"} == set(tags)


def test_no_loss_is_named_outside_its_own_places() -> None:
    """Its class, its options, presets, names of other trainers, and the float64 oracle, which shares nothing."""
    places = ("losses/", "config/losses.py", "config/presets.py", "config/foreign.py", "tools/verify/oracle/")
    wrong = {name: found for name, tree in sources() if not name.startswith(places) and (found := said_names(tree))}
    assert not wrong


def test_a_loss_that_is_named_elsewhere_is_found() -> None:
    assert said_names(ast.parse('if config.loss.type == "gspo":\n    pass\n')) == {"gspo"}
    assert said_names(ast.parse("from truestep.config.losses import GspoLoss\n")) == {"GspoLoss"}
    assert said_names(ast.parse("def f():\n    '''As gspo does.'''\n")) == set()


def test_a_function_fits_a_screen() -> None:
    wrong = {}
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if node.end_lineno - first + 1 > MOST_LINES:
                    wrong[f"{file}:{node.name}"] = node.end_lineno - first + 1
    assert not wrong


def test_a_docstring_begins_as_a_sentence() -> None:
    wrong = [
        f"{file}: {name}: {text.splitlines()[0]}"
        for file, tree in sources()
        for name, text, _ in documented(tree)
        if FRAGMENT.match(text)
    ]
    assert not wrong


@pytest.mark.parametrize(("text", "fragment"), [("Of a rank.", True), ("Offer it.", False), ("Give a rank.", False)])
def test_a_fragment_is_told_from_a_sentence(text: str, fragment: bool) -> None:
    assert bool(FRAGMENT.match(text)) is fragment
