"""Plants faults in copies of the repository and runs the tests that cover them, a process for each fault.

The process of a fault is forked from one that has imported what takes long and is not the code under test: torch,
transformers, pytest. A copy's bytecode is bound to the content of its sources, and not to their times, which one fault
and the next may share.
"""

from __future__ import annotations

import compileall
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any, NoReturn

import pytest

from faults.listed import Fault

# What is in no copy: it is large, or belongs to the clone alone.
_NOT_COPIED = (".git", ".venv", ".cache", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")
_SLACK = 60.0  # seconds more than the tests' own limit, after which they are ended from outside
CAUGHT, MISSED, NOT_PLANTED, BROKEN = "caught", "missed", "not planted", "broken"


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    result: str
    seconds: float
    test: str = ""  # the first one that failed
    told: str = ""  # why it could not be planted, or its tests not be run


@dataclass(frozen=True)
class _Running:
    fault: Fault
    copy: Path
    since: float


def run_all(
    faults: Sequence[Fault],
    repository: Path,
    *,
    seed: int = 0,
    jobs: int = 1,
    limit: float = 300.0,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Plant each fault in turn, in an order of the seed. `limit`: seconds that a test may take."""
    waiting = list(faults)
    random.Random(seed).shuffle(waiting)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="truestep-faults-") as scratch:
        free = [_copy(repository, Path(scratch) / str(number)) for number in range(jobs)]
        running: dict[int, _Running] = {}
        try:
            while waiting or running:
                while waiting and free:
                    fault, copy = waiting.pop(0), free.pop()
                    started = _start(fault, repository, copy, limit)
                    if isinstance(started, Outcome):
                        outcomes.append(started)
                        tell(started)
                        free.append(copy)
                    else:
                        running[started] = _Running(fault, copy, time.monotonic())
                for pid, one in list(running.items()):
                    late = time.monotonic() - one.since > 2 * limit + _SLACK
                    if late:
                        _end(pid)
                    if late or os.waitpid(pid, os.WNOHANG)[0]:
                        del running[pid]
                        _end(pid)  # what its tests may have left
                        outcomes.append(_read(one, late))
                        tell(outcomes[-1])
                        shutil.copyfile(repository / one.fault.file, one.copy / one.fault.file)
                        free.append(one.copy)
                time.sleep(0.02)
        finally:
            for pid in running:
                _end(pid)
        return _confirmed(outcomes, Path(scratch) / "0", limit)


def _confirmed(outcomes: Sequence[Outcome], copy: Path, limit: float) -> list[Outcome]:
    """Run the tests that failed once more, without any fault: one that fails there has caught nothing."""
    tests = sorted({outcome.test for outcome in outcomes if outcome.result == CAUGHT and "::" in outcome.test})
    if not tests:
        return list(outcomes)
    pid = os.fork()
    if pid == 0:
        _work(tests, copy, limit, stop=False)
    os.waitpid(pid, 0)
    found = json.loads((copy / "outcome.json").read_text(encoding="utf-8"))
    told = "this test fails without the fault too"
    return [
        Outcome(outcome.fault, BROKEN, outcome.seconds, outcome.test, told)
        if outcome.result == CAUGHT and outcome.test in found["failed"]
        else outcome
        for outcome in outcomes
    ]


def _copy(repository: Path, copy: Path) -> Path:
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
    compileall.compile_dir(copy / "src", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return copy


def _start(fault: Fault, repository: Path, copy: Path, limit: float) -> int | Outcome:
    """Plant a fault and start its tests; give the process, or why there is none."""
    try:
        fault.plant(copy)
    except ValueError as error:
        return Outcome(fault, NOT_PLANTED, 0.0, told=str(error))
    (copy / "outcome.json").unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _work(fault.tests, copy, limit, stop=True)
    return pid


def _end(pid: int) -> None:
    """End a process, and all of its group that is left."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _read(one: _Running, late: bool) -> Outcome:
    seconds = time.monotonic() - one.since
    if late:  # no single test did, which its own limit ends
        return Outcome(one.fault, BROKEN, seconds, told="its tests did not end: give them more time (--limit)")
    file = one.copy / "outcome.json"
    log = (one.copy / "outcome.log").read_text(encoding="utf-8", errors="replace")
    if not file.is_file():  # the process itself ended in the middle, as where a limit ends it
        return Outcome(one.fault, CAUGHT, seconds, "its tests ended the process", told=log[-2000:])
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["failed"]:
        return Outcome(one.fault, CAUGHT, seconds, found["failed"][0])
    if found["code"] != pytest.ExitCode.OK or not found["passed"]:
        return Outcome(one.fault, BROKEN, seconds, told=log[-2000:])
    return Outcome(one.fault, MISSED, seconds)


class _Recorder:
    """Takes note of what became of each test."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        self.passed += report.when == "call" and report.passed


def _work(tests: Sequence[str], copy: Path, limit: float, *, stop: bool) -> NoReturn:
    """Run tests of a copy, in a process that was forked for it, and write down what became of them."""
    try:
        os.setsid()
        log = os.open(copy / "outcome.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(copy)
        _forget("truestep")
        os.environ["PYTHONPATH"] = os.pathsep.join((str(copy / "src"), str(copy / "tests")))
        sys.path[:0] = [str(copy / "src"), str(copy / "tests")]
        recorder = _Recorder()
        # Which tests of a file are too many for this is said by their marks, and a test that is named is run.
        chosen = [] if any("::" in test for test in tests) else ["-m", "not long and not nightly and not release"]
        options = ["-p", "no:cacheprovider", "--hypothesis-seed=0", "-o", f"timeout={limit:g}", *chosen]
        code = pytest.main([*options, *(["-x"] if stop else []), *tests], plugins=[recorder])
        found = {"code": int(code), "passed": recorder.passed, "failed": recorder.failed}
        (copy / "outcome.json").write_text(json.dumps(found), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def import_first(repository: Path) -> None:
    """Import what takes long, so that each process that is forked has it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runpy.run_path(str(repository / "src/truestep/ranks/preload.py"))
    for name in ("hypothesis", "numpy", "pydantic", "pyarrow.parquet", "rich.console", "safetensors.torch"):
        with suppress(ImportError):
            importlib.import_module(name)
