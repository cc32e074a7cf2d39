"""Imports go one way: a room may use those below it and never those above."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

import truestep

ROOT = Path(truestep.__file__).parent
# From the top of the house to its ground. Rooms of one floor do not know each other.
FLOORS = (
    ("__main__",),
    ("commands",),
    ("tools",),
    ("run",),
    ("generate",),
    ("step", "plan"),
    ("environments", "model", "report"),
    ("head", "rollouts", "weights"),
    ("losses", "ranks"),
    ("config", "metrics", "numerics"),
    ("files", "gpu", "weight_transfer", "types"),
    ("errors", "process", "text"),
    ("__init__",),
)
MOST_ROOMS = 24
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


_parsed = cache(ast.parse)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(_parsed(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            names = [node.module or ""]
            if node.module == "truestep":
                names = [f"truestep.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "truestep":
                known = len(parts) > 1 and parts[1] in FLOOR
                rooms.add(parts[1] if known else "__init__")
    return rooms


def imported_modules(source: str, modules: Collection[str]) -> set[str]:
    """Collect the modules that a source imports, also inside functions and for its types alone."""
    found = set()
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & set(modules) or {node.module or ""}
    return found & set(modules)


def circles(sources: Mapping[str, str]) -> list[set[str]]:
    """Find the sets of modules that import each other, directly or through others."""
    return _circles({module: imported_modules(source, sources) for module, source in sources.items()})


def _circles(reached: dict[str, set[str]]) -> list[set[str]]:
    for middle in reached:
        for module, others in reached.items():
            if middle in others:
                reached[module] = others | reached[middle]
    found: list[set[str]] = []
    for module in reached:
        circle = {other for other in reached[module] if module in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def circles_of_folders(sources: Mapping[str, str]) -> dict[str, list[set[str]]]:
    """Find, in each folder, the sets of its files and sub-folders that import each other."""
    levels: dict[str, dict[str, set[str]]] = {}
    for module, source in sources.items():
        for other in imported_modules(source, sources):
            mine, theirs = module.split("."), other.split(".")
            depth = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
            if depth is not None:  # None: a folder's own __init__ is one of the two
                level = levels.setdefault(".".join(mine[:depth]), {})
                level.setdefault(mine[depth], set()).add(theirs[depth])
                level.setdefault(theirs[depth], set())
    return {folder: found for folder, level in levels.items() if (found := _circles(level))}


def module_of(path: Path) -> str:
    return ".".join(("truestep", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def wrong_imports(room: str, source: str) -> list[str]:
    return sorted(other for other in imported_rooms(source) if other != room and FLOOR[other] <= FLOOR[room])


def test_no_import_runs_back_up() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in sorted(ROOT.rglob("*.py"))
        if (found := wrong_imports(room_of(path), path.read_text(encoding="utf-8")))
    }
    assert not wrong


def test_no_modules_import_each_other() -> None:
    assert not circles({module_of(path): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")})


def test_no_folders_import_each_other() -> None:
    assert not circles_of_folders({module_of(path): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")})


def test_a_circle_of_folders_is_caught() -> None:
    sources = {
        "truestep.a.low.first": "",
        "truestep.a.low.second": "from truestep.a.high.first import work\n",
        "truestep.a.high.first": "",
        "truestep.a.high.second": "",
    }
    assert not circles_of_folders(sources)
    sources["truestep.a.high.second"] = "import truestep.a.low.first\n"
    assert circles_of_folders(sources) == {"truestep.a": [{"low", "high"}]}
    assert not circles(sources), "no two files import each other"


def test_there_are_few_rooms() -> None:
    assert len([room for room in FLOOR if not room.startswith("__")]) <= MOST_ROOMS


def test_a_circle_of_imports_is_caught() -> None:
    chain = {
        "truestep.a.first": "from truestep.a.second import work\n",
        "truestep.a.second": "def late():\n    from truestep.a import third\n",
        "truestep.a.third": "",
        "truestep.a": "",
    }
    assert not circles(chain)
    for back in (
        "def late():\n    import truestep.a.first\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from truestep.a import first\n",
    ):
        found = circles(chain | {"truestep.a.third": back})
        assert found == [{"truestep.a.first", "truestep.a.second", "truestep.a.third"}]


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in ROOT.rglob("*.py")} == set(FLOOR)


def test_an_import_that_runs_back_up_is_caught() -> None:
    assert wrong_imports("losses", "from truestep.step.runner import StepRunner\n") == ["step"]
    assert wrong_imports("losses", "def late():\n    import truestep.commands.cli\n") == ["commands"]
    assert wrong_imports("losses", "from truestep import head\n") == ["head"]


def test_the_configuration_imports_no_torch() -> None:
    modules = "truestep.config.load, truestep.config.describe, truestep.commands.cli"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.long  # torch and transformers are imported
def test_training_imports_no_optional_package() -> None:
    """An extra is imported where it is used, so that `pip install .` alone trains."""
    missing = ("httpx", "starlette", "uvicorn", "redis", "fla", "flash_attn", "wandb", "verifiers", "openenv")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import truestep.run.train"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
