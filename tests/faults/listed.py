"""The list of faults: what each is, where it is planted, and which tests cover that place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PLANTED = HERE / "planted"


@dataclass(frozen=True)
class Fault:
    name: str
    what: str  # the mistake, as a sentence
    room: str
    file: str  # where it is planted, from the repository's root
    old: str  # the right code, which the file has exactly once
    new: str  # the wrong code
    tests: tuple[str, ...]  # files or functions of the tests that cover the place, from the repository's root

    def plant(self, repository: Path) -> None:
        """Write the fault into the file of a copy of the repository. ValueError says why it cannot be planted."""
        file = repository / self.file
        if not file.is_file():
            raise ValueError(f"{self.file} is not there")
        right = file.read_text(encoding="utf-8")
        if (count := right.count(self.old)) != 1:
            raise ValueError(f"{self.file} has the code that is to be replaced {count} times, not once: {self.old!r}")
        file.write_text(right.replace(self.old, self.new), encoding="utf-8")


def read_faults(folder: Path = PLANTED) -> list[Fault]:
    faults = []
    for file in sorted(folder.glob("*.yaml")):
        for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
            faults.append(Fault(**entry | {"room": file.stem, "tests": tuple(entry["tests"])}))
    return faults


def problems(fault: Fault, repository: Path) -> Iterator[str]:
    """Say why a fault cannot be planted any more, or which of its tests are gone."""
    file = repository / fault.file
    right = file.read_text(encoding="utf-8") if file.is_file() else ""
    if right.count(fault.old) != 1:
        yield f"{fault.file} has the code that is to be replaced {right.count(fault.old)} times, not once"
        return
    if fault.old == fault.new:
        yield "it replaces code by itself"
    try:
        ast.parse(right.replace(fault.old, fault.new))
    except SyntaxError as error:
        yield f"what it makes of {fault.file} is no Python: {error}"
    if not fault.tests:
        yield "it names no test"
    for test in fault.tests:
        path, _, function = test.partition("::")
        if not (repository / path).is_file():
            yield f"{path} is not there"
        elif function and function.partition("[")[0] not in _functions(repository / path):
            yield f"{path} has no test {function}"


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
