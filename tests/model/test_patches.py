"""Every place that changes objects of transformers or torch is on the list in `model/fast`, and the list is right."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import truestep
from truestep.model import fast as model

ROOT = Path(truestep.__file__).parent
ROOMS = ("generate", "gpu", "head", "losses", "model", "ranks", "step", "weights")
VALUES = {"data", "grad"}  # of tensors, which are there to be written
OURS = {"self", "saved", "cls", "loading"}


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def written(source: str) -> Iterator[str]:
    """Attributes of objects that a module writes to, and calls that hook into them."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in [part for each in targets for part in getattr(each, "elts", [each])]:
            if isinstance(target, ast.Attribute) and root(target) not in OURS and target.attr not in VALUES:
                yield target.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            yield "setattr"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and root(node.func) not in OURS:
            if node.func.attr == "register":
                yield f"{root(node.func)}.register"
            elif node.func.attr.startswith("register_") or node.func.attr == "_apply":
                yield node.func.attr


def knows_torch(source: str) -> bool:
    return "import torch" in source or "from torch" in source or "transformers" in source


def found() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), what)
        for path in [*(path for room in ROOMS for path in (ROOT / room).rglob("*.py")), ROOT / "files/tensors.py"]
        if "servers" not in path.parts and knows_torch(path.read_text(encoding="utf-8"))
        for what in written(path.read_text(encoding="utf-8"))
        if what not in ("_stored", "frozen", "shared")  # of our own tensors without values, and of our own weights
    }


def listed() -> set[tuple[str, str]]:
    lines = [line.split("|")[1:3] for line in (model.__doc__ or "").splitlines() if ".py |" in line]
    return {(file.strip(), what) for file, whats in lines for what in whats.strip().split(", ")}


def test_every_patch_is_listed_and_nothing_else() -> None:
    assert found() == listed()


def test_a_patch_is_seen() -> None:
    source = (
        "layer.forward = late\nmodule.safe_open, other.x = 1, 2\nsetattr(a, b, c)\nlayer.register_forward_hook(h)\n"
    )
    assert list(written(source)) == ["forward", "safe_open", "x", "setattr", "register_forward_hook"]
    assert not list(written("self.layers.view = view\nparameter.grad = None\n"))
