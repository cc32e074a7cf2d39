"""The documentation is true: its links lead somewhere, its commands parse, its configurations load, its messages are
printed. Each check is shown to fail on a fault of its kind."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import click
import pytest
import yaml

import truestep
from pages import (
    ROOT,
    Block,
    Page,
    all_pages,
    elsewhere,
    read_page,
    refused,
    shell_commands,
    truestep_arguments,
    wrong_options,
)
from selection import long_except
from truestep.commands.cli import main
from truestep.config import describe, foreign
from truestep.ranks.watch import RankState, verdict

# What a run writes, and what stands for a user's own file: no file of the repository.
NOT_OURS = re.compile(
    r"(my_package|models|runs|rollouts|chats|checkpoints|weights|proof|part-|trl|verl|src/prime_rl|openrlhf|slime|fast_llm|pipelinerl|examples/configs|skyrl-train|open_instruct)\b.*"
)
TRIED = Path("docs/mistakes.md")  # its messages are about wrong options, and tests/test_mistakes.py gets each of them
SECTIONS = {name.split(".")[0] for name in describe.sections()}


@cache
def pages() -> tuple[Page, ...]:
    return tuple(all_pages())


Check = Callable[[Page], Iterator[str]]


def broken_links(page: Page) -> Iterator[str]:
    for link, line in page.links:
        file, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = os.path.normpath(page.path.parent / file) if file else str(page.path)
        known = {str(other.path): other for other in pages()} | {str(page.path): page}
        if not (ROOT / target).exists() and target not in known:
            yield f"{page.at(line)}: {link}: there is no {target}"
        elif anchor and target in known and anchor not in known[target].anchors:
            yield f"{page.at(line)}: {link}: {target} has no heading #{anchor}"
        elif anchor and target not in known:
            yield f"{page.at(line)}: {link}: an anchor of a file that is not read here"


@cache
def repository_files() -> frozenset[str]:
    below = (".ci", "benchmarks", "docs", "examples", "src", "tests")
    return frozenset(f"/{file.relative_to(ROOT)}" for name in below for file in (ROOT / name).rglob("*.*"))


def missing_files(page: Page) -> Iterator[str]:
    """Look for the files that inline code names by a path, or by the end of one."""
    for code, line in page.code:
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", code) or NOT_OURS.fullmatch(code):
            continue
        known = any(file.endswith(f"/{code}") for file in repository_files())
        if re.search(r"\.(py|md|yaml|yml|sh|json|jsonl|toml|txt)$", code) and not known:
            yield f"{page.at(line)}: `{code}`: there is no such file"


def wrong_commands(page: Page) -> Iterator[str]:
    for text, line in [(block.text, block.line) for block in page.of("bash", "sh")] + page.code:
        inline = "\n" not in text
        if inline and not re.match(r"(torchrun|truestep|python -m truestep)\b.* ", text):
            continue
        # A usage line: options in brackets may be left out.
        for command in shell_commands(re.sub(r"\[(--[^\]]*)\](\.\.\.)?", r"\1", text)):
            arguments = truestep_arguments(command)
            if arguments is not None and (wrong := refused(arguments, inline)):
                yield f"{page.at(line)}: {' '.join(command)}: {wrong}"


STAND_IN = """
from dataclasses import dataclass
from truestep.losses.label_losses import LabelLoss

@dataclass(frozen=True)
class {name}(LabelLoss):
    temperature: float = 1.0
"""


def write_own_code(page: Page) -> None:
    """Write the modules that the page's configurations name: the page's own Python, and what stands for a user's."""
    code = "\n".join(block.text for block in page.of("python") if "class" in block.text)
    Path("my_objective.py").write_text(code, encoding="utf-8")
    Path("m.py").write_text(STAND_IN.format(name="f"), encoding="utf-8")
    Path("my_package").mkdir()
    Path("my_package/losses.py").write_text(STAND_IN.format(name="Sigmoid"), encoding="utf-8")


def filled_in(code: str) -> str:
    """Put values where inline code has letters: `parallel: {tensor: T}`, `loss: {type: custom, function}`."""
    code = re.sub(r"(?<=: )[A-Z]\b", "2", code)
    return re.sub(
        r"(?<=[{,] )(function|options)(?=[,}])",
        lambda name: f"{name[0]}: {'{}' if name[0] == 'options' else 'm:f'}",
        code,
    )


def wrong_yaml(page: Page) -> Iterator[str]:
    inline = [
        Block("yaml", filled_in(code), line)
        for code, line in page.code
        if re.match(rf"({'|'.join(SECTIONS)}): {{", code)
    ]
    with elsewhere():
        write_own_code(page)
        for block in [*page.of("yaml"), *inline]:
            try:
                parts = list(yaml.safe_load_all(re.sub(r", *(\.\.\.|…)(?=})", "", block.text)))
            except yaml.YAMLError as error:
                yield f"{page.at(block.line)}: not valid YAML: {error}"
                continue
            for options in parts:
                if wrong := wrong_options(options):
                    yield f"{page.at(block.line)}: {wrong}"


def wrong_names(page: Page) -> Iterator[str]:
    """Look for options that inline code names and the schema does not have."""
    if page.path == TRIED:
        return
    known = describe.options().keys() | describe.sections().keys()
    for code, line in page.code:
        name = code.split(":")[0].removeprefix("--").split(" ")[0]
        option = re.fullmatch(r"\w+(\.\w+)+", name) and name.split(".")[0] in SECTIONS
        if page.path.name == "coming-from.md" and name in foreign.table().options:
            continue
        if option and name not in known and not re.search(r"\.(py|yaml|jsonl?|md)$", name):
            yield f"{page.at(line)}: `{code}`: there is no option {name}"


def wrong_targets(page: Page) -> Iterator[str]:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for text, line in [(block.text, block.line) for block in page.of("bash", "sh")] + page.code:
        for command in shell_commands(text) if text.startswith("make ") or "\nmake " in text else ():
            if command[:1] == ["make"]:
                for word in command[1:]:
                    if "=" not in word and not word.startswith("-") and word != "..." and word not in targets:
                        yield f"{page.at(line)}: make {word}: the Makefile has no such target"


def wrong_json(page: Page) -> Iterator[str]:
    for block in page.of("json"):
        for text in block.text.splitlines() if block.text.count("\n{") else [block.text]:
            try:
                json.loads(text)
            except ValueError as error:
                yield f"{page.at(block.line)}: not valid JSON: {error}"


def wrong_python(page: Page) -> Iterator[str]:
    """Parse Python, and look for what it imports of truestep."""
    for block in page.of("python"):
        try:
            tree = ast.parse(block.text)
        except SyntaxError as error:
            yield f"{page.at(block.line)}: not valid Python: {error}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "truestep":
                module = __import__(str(node.module), fromlist=["*"])
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        yield f"{page.at(block.line)}: {node.module} has no {alias.name}"


HOLE = "\0"
ENDS = " :;,.()"


@cache
def templates() -> tuple[str, ...]:
    """Collect every text of the sources that has words in it, with a hole where a value is put in."""
    found = set()
    for file in Path(truestep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    texts = (re.sub(r"\[/?[a-z ]*\]|^(error|warning):", "", text).strip(ENDS) for text in found)
    return tuple(text for text in texts if re.search(r"[a-z]{2,}", text))


@cache
def said(message: str) -> bool:
    """Tell whether the sources print a message.

    With `…` in it, which stands for anything, one text of theirs has the parts in their order. Without, one text of
    theirs is the message, with values in its holes.
    """
    message = re.sub("^(error|warning): ", "", message)
    if "…" in message:
        parts = [part.strip(ENDS) for part in message.split("…")]
        return any(in_order(parts, template) for template in templates())
    least = 2 if message.startswith("rank ") else 4
    return any(
        len(re.findall(r"[a-z]{2,}", template)) >= least
        and re.fullmatch(".+".join(re.escape(part) for part in template.split(HOLE)), message)
        for template in templates()
        if all(part in message for part in template.split(HOLE))
    )


def in_order(parts: Sequence[str], text: str) -> bool:
    """Tell whether a text has the parts in their order, with anything between them."""
    end = 0
    for part in parts:
        if (begin := text.find(part, end)) < 0:
            return False
        end = begin + len(part)
    return True


@cache
def of_ranks() -> tuple[str, ...]:
    """Let the watch over ranks say what the pages show: its messages are made of many texts."""
    waits = RankState(rank=0, phase="computing step 7", number=7, since=640, idle=602, waits="ranks")
    works = RankState(rank=0, phase="computing step 7", number=7, since=1, idle=1)
    gone = RankState(rank=1, phase="computing step 2", number=2, since=1, idle=1, process="gone")
    slow = RankState(rank=1, phase="computing step 7", number=7, since=640, idle=602, place="rewards.py:31 in score")
    saves = RankState(
        rank=1,
        phase="saving after step 20",
        number=20,
        since=655,
        idle=602,
        waiting_for="the disk to write /runs/a/part-00001.safetensors",
        place="tensors.py:91 in sync",
    )
    pairs = ((works, [gone]), (waits, [slow]), (works, [saves]), (slow, []))
    return tuple(str(verdict(own, others, timeout=600, silence=60)) for own, others in pairs)


def wrong_messages(page: Page) -> Iterator[str]:
    """Look for messages in blocks of text, and in inline code of some words with `…` where values are."""
    if page.path == TRIED:
        return
    for code, line_number in page.code:
        if "…" in code and len(re.findall(r"[a-z]{2,}", code)) >= 4 and ": {" not in code and not said(code):
            yield f"{page.at(line_number)}: no source prints: {code}"
    for block in page.of("text"):
        for line in block.text.splitlines():
            message = re.sub(r"^(error: |warning: )(rank \d ends: )?", "", line)
            if (message != line or "…" in line) and message not in of_ranks() and not said(message):
                yield f"{page.at(block.line)}: no source prints: {line}"


CHECKS: dict[str, Check] = {
    "links": broken_links,
    "files": missing_files,
    "commands": wrong_commands,
    "yaml": wrong_yaml,
    "names": wrong_names,
    "targets": wrong_targets,
    "json": wrong_json,
    "python": wrong_python,
    "messages": wrong_messages,
}


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page's own code is imported from a directory that is gone afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("m", "my_objective", "my_package"):
            del sys.modules[name]


@pytest.mark.parametrize("check", long_except(CHECKS, *(name for name in CHECKS if name != "messages")))
def test_the_pages_are_true(check: str) -> None:
    assert not [problem for page in pages() for problem in CHECKS[check](page)]


FAULTS = {
    "links": ["[a](docs/nowhere.md)", "[a](#no-such-heading)", "[a](docs/contract.md#no-such-heading)"],
    "files": ["`tests/nowhere.py`", "`step/nowhere.py`"],
    "commands": [
        "```bash\ntruestep trian c.yaml\n```",
        "```bash\nA=1 truestep plan c.yaml --memry 80\n```",
        "```bash\ntruestep train c.yaml --optimizer.learning_rte 1\n```",
        "```bash\ntorchrun --nproc-per-node 2 -m truestep \\\n  train\n```",
        "`truestep verify c.yaml --ranks none`",
    ],
    "yaml": [
        "```yaml\nmodel: {path: m}\nloss: {type: gspo, epsilon: 1}\n```",
        "```yaml\nmodel: {path: m\n```",
        "```yaml\nschedule: {docs_per_step: 6}\ndata: {group_size: 4}\nsampler: {prompts: p, reward: r}\n```",
        "`sampler: {type: severs}`",
    ],
    "names": ["`optimizer.lr`", "`--data.advantages.scale 1`"],
    "targets": ["```bash\nmake tset\n```", "`make tset`"],
    "json": ["```json\n{'id': 1}\n```", '```json\n{"id": 1}\n{"id": }\n```'],
    "python": ["```python\ndef f(:\n```", "```python\nfrom truestep.types import Rolout\n```"],
    "messages": [
        "```text\nerror: the moon is in the wrong place today\n```",
        "`warning: the … is full of … today`",
        "```text\nwarning: ratio_new_old is … at step 1, where it rains\n```",
    ],
}


@pytest.mark.parametrize(("check", "text"), [(check, text) for check, texts in FAULTS.items() for text in texts])
def test_a_fault_is_found(check: str, text: str) -> None:
    assert list(CHECKS[check](read_page(text, Path("planted.md"))))


def test_every_check_has_a_fault() -> None:
    assert FAULTS.keys() == CHECKS.keys()


def test_the_pages_have_what_is_checked() -> None:
    """Nothing is skipped: so many of each kind are seen."""
    commands = [words for page in pages() for block in page.of("bash") for words in shell_commands(block.text)]
    assert sum(truestep_arguments(words) is not None for words in commands) > 15
    assert sum(len(page.links) for page in pages()) > 80
    assert sum(len(list(page.of("yaml"))) for page in pages()) > 10


def test_the_messages_of_ranks_are_those_of_the_watch() -> None:
    (page,) = (page for page in pages() if page.path.name == "ranks.md")
    (block,) = page.of("text")
    shown = [re.sub(r"^error: rank \d ends: ", "", line) for line in block.text.splitlines()]
    assert [line for line in shown if "failed: " not in line] == list(of_ranks()[:3])


def test_every_command_has_a_row_in_the_readme() -> None:
    rows = re.findall(
        r"^\| `truestep ([a-z -]+?)(?: [A-Z-].*?)?` \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    commands = {
        f"{name} {inner}".strip()
        for name, command in main.commands.items()
        for inner in (command.commands if isinstance(command, click.Group) else [""])
    }
    assert commands == set(rows)


def long_lines(text: str) -> Iterator[int]:
    """Give the lines of prose that are too long to read: more than 140 characters, in no table and no block of code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith(("|", "    ")) and len(line) > 140:
            yield number


def test_lines_of_prose_are_wrapped() -> None:
    read = [page.path for page in pages() if page.path.parts[0] != "tests"]
    long = {str(path): list(long_lines((ROOT / path).read_text(encoding="utf-8"))) for path in read}
    assert {name: lines for name, lines in long.items() if lines} == {}
    word = "word " * 30
    assert list(long_lines(f"{word}\n| {word} |\n```\n{word}\n```\n- {word}\n")) == [1, 6]


def test_changes_and_results_stay_short() -> None:
    for name, most in (("CHANGELOG.md", 60), ("benchmarks/RESULTS.md", 500)):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most, name


def test_the_figures_of_the_readme_are_results() -> None:
    """Each figure of README.md's table of speeds stands in RESULTS.md, and so does each command's script."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast it is")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if "| " in line]
    assert len(rows) > 6
    for _, ours, peers, command in rows[2:]:
        figures = re.findall(r"(?<![\d.-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?", f"{ours} {peers}")
        assert len(figures) >= 2
        assert [
            figure for figure in figures if not re.search(rf"(?<![\d,.]){re.escape(figure)}(?![\d.])", results)
        ] == []
        script = re.match(r"`python (benchmarks/\w+\.py)", command)
        assert command == "the same" or (script and script[1] in results and (ROOT / script[1]).is_file()), command


def test_each_ceiling_of_security_has_its_test() -> None:
    """Each row of SECURITY.md's table names the file of its test, and each decoder that it names is bounded there."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("## How much of it is read")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 13
    for *_, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert named and all((ROOT / name).is_file() for name in named), tests


def _first_block() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition("```bash\n")[2].partition("```")[0]
    return [line.partition("#")[0].strip() for line in block.splitlines()]


def test_the_first_block_of_the_readme(tmp_path: Path) -> None:
    """It installs the versions that are tested, of which each package that is needed is one, and the demo runs."""
    install, demo = _first_block()
    assert install == "pip install -c constraints.txt ."
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[<>=;\[ ]", one)[0] for one in project["dependencies"]}
    assert needed <= pinned
    main([*demo.split()[1:], "--help"], standalone_mode=False)


def test_the_readme_needs_nothing_that_it_does_not_install() -> None:
    """Each module that a command runs comes with the package, and each extra that a page names is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for file in [ROOT / "README.md", *(ROOT / "src/truestep/tools/init/templates").glob("*/README.md")]:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"python -m (?!truestep)\w+", text), file
        assert set(re.findall(r"truestep\[(\w+)\]|'\.\[(\w+)\]'", text)) <= {
            pair for name in project["optional-dependencies"] for pair in ((name, ""), ("", name))
        }
