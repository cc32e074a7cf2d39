"""What makes a start quick: bytecode, imports and answers that are kept."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import truestep
from truestep.commands import imports
from truestep.commands.imports import importing, kept_names
from truestep.process import bytecode

SOURCES = Path(truestep.__file__).parents[1]
WHERE = """
import os, subprocess, sys
from truestep.process.bytecode import keep_bytecode
keep_bytecode()
import torch
assert torch.__file__.startswith({here!r}), torch.__file__
code = "import torch.inner as one; print(one.__cached__, __import__('os').path.exists(one.__cached__))"
print(torch.__cached__, os.path.exists(torch.__cached__), flush=True)
subprocess.run([sys.executable, "-c", code], check=True)
"""


def bytecode_of(folder: Path, **variables: str) -> list[list[str]]:
    """Start a Python that imports a package called torch, and another Python of its own. Return where the bytecode of
    each is, and whether it is there."""
    package = folder / "packages" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("one = 1\n")
    (package / "inner.py").write_text("two = 2\n")
    unset = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": f"{package.parent}{os.pathsep}{SOURCES}", "XDG_CACHE_HOME": str(folder / "cache")}
    code = WHERE.format(here=str(package))
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    )
    return [line.split() for line in ran.stdout.splitlines()]


def test_bytecode_is_kept_where_python_may_not_write_it(tmp_path: Path) -> None:
    found = bytecode_of(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert len(found) == 2
    for place, is_there in found:  # also that of a process which the first one started
        assert place.startswith(str(tmp_path / "cache" / "truestep" / "bytecode")) and is_there == "True"
    assert not list((tmp_path / "packages").rglob("*.pyc"))


def test_bytecode_beside_the_sources_is_used(tmp_path: Path) -> None:
    for variables in ({}, {"PYTHONDONTWRITEBYTECODE": "1"}):  # the second process finds what the first wrote
        place, is_there = bytecode_of(tmp_path, **variables)[0]
        assert place.startswith(str(tmp_path / "packages")) and is_there == "True"
    assert not (tmp_path / "cache").exists()


def test_a_directory_for_bytecode_that_the_user_chose_stays(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    place, is_there = bytecode_of(tmp_path, PYTHONPYCACHEPREFIX=str(chosen))[0]
    assert place.startswith(str(chosen)) and is_there == "True"


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_has_no_bytecode_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(bytecode, "_is_kept", lambda package: False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    bytecode.keep_bytecode()
    assert sys.pycache_prefix is None


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "truestep" / "imports"


def test_names_are_read_again_only_after_a_change(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "models", []
    (folder / "one").mkdir(parents=True)
    source = folder / "one" / "modeling_one.py"
    source.write_text("__all__ = ['One']\n")
    names = {"one": {frozenset({"torch"}): {"modeling_one": {"One", "Other"}}, frozenset(): {"empty": set()}}}

    def read(place: Path) -> Any:
        asked.append(place)
        return names

    def asks() -> int:
        before = len(asked)
        found = kept_names(folder, read)
        assert found == names and isinstance(found["one"][frozenset({"torch"})]["modeling_one"], set)
        return len(asked) - before

    assert (asks(), asks()) == (1, 0)
    source.write_text("__all__ = ['One', 'Two']\n")
    assert (asks(), asks()) == (1, 0)
    (kept,) = own_cache.iterdir()
    for damage in (b"", b"[]", b"{}", kept.read_bytes()[:-20], kept.read_bytes().replace(b'"pairs"', b'"trios"')):
        kept.write_bytes(damage)
        assert (asks(), asks()) == (1, 0), damage
    kept.unlink()
    kept.mkdir()  # it cannot be written
    assert (asks(), asks()) == (1, 1)
    monkeypatch.setattr(imports, "cache_directory", no_home)
    assert asks() == 1


def test_the_kept_names_are_those_that_transformers_reads(own_cache: Path) -> None:
    import transformers
    from transformers.utils import import_utils

    folder = Path(transformers.__file__).parent / "models"
    right = import_utils.create_import_structure_from_path(folder)
    assert kept_names(folder, lambda place: right) is right
    kept = kept_names(folder, lambda place: pytest.fail("it was read again"))
    assert kept == right and kept is not right


STARTS = """
import gc
from truestep.commands.imports import importing
with importing():
    assert not gc.isenabled()
    import transformers
    from transformers.utils import import_utils
    import torch
    from transformers import LlamaConfig
assert gc.isenabled() and gc.get_freeze_count() > 10_000
assert not any(type(finder).__module__.startswith("truestep") for finder in __import__("sys").meta_path)
assert import_utils.create_import_structure_from_path.__module__ == "truestep.commands.imports"
print(LlamaConfig().model_type)
"""


@pytest.mark.long
def test_a_new_process_imports_by_the_kept_names(own_cache: Path) -> None:
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    )
    states = []
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", STARTS], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0 and ran.stdout == "llama\n", ran.stderr
        (kept,) = own_cache.iterdir()
        states.append(kept.stat().st_mtime_ns)
    assert states[0] == states[1]  # the second process wrote nothing


def test_a_process_that_has_torch_is_left_as_it_is() -> None:
    importlib.import_module("torch")
    finders, frozen = list(sys.meta_path), gc.get_freeze_count()
    with importing():
        assert gc.isenabled() and sys.meta_path == finders
    assert gc.get_freeze_count() == frozen


def test_scikit_learn_is_hidden_from_one_module_alone() -> None:
    from transformers import utils

    seen, before = [], utils.is_sklearn_available
    module = ModuleType("one")
    imports._without_scikit_learn(lambda one: seen.append((one, utils.is_sklearn_available())), module)
    assert seen == [(module, False)] and utils.is_sklearn_available is before
