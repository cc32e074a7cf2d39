"""Candidates of an autotuned kernel are compiled in threads, all of them before the first is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


def autotuned(how: str, folder: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / how), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, str(Path(__file__).parent / "autotuned.py"), how]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_candidates_are_compiled_in_threads_before_one_is_timed(tmp_path: Path) -> None:
    plain, threads = (autotuned(how, tmp_path) for how in ("plain", "threads"))
    assert plain["best"] == threads["best"] and not any(plain["compiled"])
    assert plain["timed"][:2] == [[0, 1], [1, 2]]  # Triton compiles a candidate when it times it
    candidates, bad = 8, 2  # two cannot be compiled; that is met again, and handled, when they are timed
    assert threads["timed"][: candidates - bad] == [[candidates, candidates]] * (candidates - bad)
    assert all(threads["compiled"][:candidates])
