"""Imports go one way: a room may use those below it and never those above."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import truestep

ROOT = Path(truestep.__file__).parent
# From the top of the house to its ground. Rooms of one floor do not know each other.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("demo", "verify", "parity"),
    ("train", "score", "export"),
    ("trainer", "assemble", "run_notes"),
    ("checkpoint",),
    ("run_directory",),
    ("sampler",),
    ("step",),
    ("policy", "environments"),
    ("head", "losses"),
    ("metrics", "rollouts", "report"),
    ("types", "config", "custom", "files", "randomness", "ranks"),
    ("errors",),
    ("__init__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(source)):
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


def wrong_imports(room: str, source: str) -> list[str]:
    return sorted(other for other in imported_rooms(source) if other != room and FLOOR[other] <= FLOOR[room])


def test_no_import_runs_back_up() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in sorted(ROOT.rglob("*.py"))
        if (found := wrong_imports(room_of(path), path.read_text(encoding="utf-8")))
    }
    assert not wrong


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in ROOT.rglob("*.py")} == set(FLOOR)


def test_an_import_that_runs_back_up_is_caught() -> None:
    assert wrong_imports("losses", "from truestep.step.run import StepRunner\n") == ["step"]
    assert wrong_imports("losses", "def late():\n    import truestep.cli\n") == ["cli"]
    assert wrong_imports("head", "from truestep import losses\n") == ["losses"]


def test_the_configuration_imports_no_torch() -> None:
    code = "import sys, truestep.config.load, truestep.config.describe, truestep.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
