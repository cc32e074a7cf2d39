"""What makes a start quick: imports without collections, and a note where Python compiles all sources each time."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import torch
from rich.console import Console

from small_runs import file_config, write_rollouts
from truestep.process.garbage import importing
from truestep.run.train import train

STARTS = """
import gc
from truestep.process.garbage import importing
try:
    with importing():
        assert not gc.isenabled()
        import torch
        raise KeyError
except KeyError:
    pass
assert gc.isenabled()
import triton
"""


def test_a_new_process_imports_without_collections() -> None:
    ran = subprocess.run([sys.executable, "-c", STARTS], check=True, capture_output=True, text=True)
    assert ran.stdout + ran.stderr == "", "no leaks are told of at the end"


def test_a_process_that_has_torch_is_left_as_it_is() -> None:
    assert "torch" in sys.modules
    with importing():
        assert gc.isenabled()


@pytest.mark.parametrize("kept", [True, False])
def test_a_start_says_that_python_keeps_no_bytecode(
    kept: bool, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    if kept:
        file = Path(cache_from_source(torch.__file__))
        file.parent.mkdir(parents=True)
        file.touch()
    write_rollouts(tmp_path / "r.jsonl", 4)
    rollouts, run, shows = tmp_path / "r.jsonl", tmp_path / "run", {"console": True}
    said = io.StringIO()
    train(file_config(tiny_model("llama"), rollouts, run, logging=shows), Console(file=said, width=400))
    assert ("PYTHONPYCACHEPREFIX=DIRECTORY keeps it" in said.getvalue()) != kept
