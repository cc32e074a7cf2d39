"""No case of `make test` takes more than three seconds of its own; what needs more is marked `long`.

A clock alone would fail cases on a machine that has other things to do. While more processes want to compute than there
are cores, each of them gets that much less done; so a case's own seconds are those on the clock, divided by how many
processes there were for each core meanwhile. Where nobody else computes this is the time on the clock, waits and sleep
included. A case whose own ranks are more than the cores is not charged for that either: what counts is what it would
take if every process had a core. Nor is it charged for what its own thread was ready to run and had no core. Where more
than four processes want each core, the estimate is worth nothing, and nobody is failed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from truestep.ranks.processes import usable_cores

# What a case may take; a slow machine may allow more.
LIMIT = float(os.environ.get("TRUESTEP_CASE_SECONDS", "3"))
NOT_JUDGED = ("long", "release", "nightly", "vllm", "gpu")
_CROWDED = 4.0  # processes for each core
_EVERY = 0.02  # seconds between two looks
_STAT = Path("/proc/stat")
_clock = time.monotonic  # a case may put a clock of its own in its place


class Machine:
    """How many processes want to compute, looked at by a thread for as long as this process is there."""

    def __init__(self) -> None:
        self._looks: list[int] = [0, 0]  # how many, and the sum of what they saw
        if _STAT.is_file():
            threading.Thread(target=self._look, name="guard", daemon=True).start()

    def seen(self) -> tuple[int, int]:
        looks, total = self._looks
        return looks, total

    def _look(self) -> None:
        while True:
            time.sleep(_EVERY)
            looks, total = self._looks
            self._looks = [looks + 1, total + running(_STAT.read_text(encoding="ascii"))]


def running(stat: str) -> int:
    """Read from /proc/stat how many processes compute, or would."""
    return next(int(line.split()[1]) for line in stat.splitlines() if line.startswith("procs_running"))


def own_seconds(clock: float, ready: float, crowd: float) -> float:
    """Give what a case takes where it has a core: of the time on the clock, what is left without the seconds in which
    its thread was only ready to run, or a share of `crowd`, how many processes there were for each core."""
    return min(clock - ready, clock / max(1.0, crowd))


def ready_seconds() -> float:
    """Give for how long this thread has been ready to run and had no core, as Linux counts it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def fork_server() -> Any:
    """Name the server of forks that there is now. What it imports first is no case's own."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]


class Guard:
    """A plugin of pytest that fails a case which takes more than so many seconds of its own."""

    def __init__(self, limit: float = LIMIT):
        self._limit = limit
        self._machine = Machine()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        began, ready, before, server = _clock(), ready_seconds(), self._machine.seen(), fork_server()
        result = yield
        clock, now = _clock() - began, self._machine.seen()
        crowd = (now[1] - before[1]) / max(1, now[0] - before[0]) / usable_cores()
        own = own_seconds(clock, ready_seconds() - ready, crowd)
        if "TRUESTEP_OWN_SECONDS" in os.environ:
            with Path(os.environ["TRUESTEP_OWN_SECONDS"]).open("a", encoding="utf-8") as file:
                file.write(f"{own:.3f} {clock:.3f} {item.nodeid}\n")
        judged = fork_server() == server and not any(item.get_closest_marker(name) for name in NOT_JUDGED)
        if judged and own > self._limit and crowd <= _CROWDED:
            pytest.fail(
                f"takes {own:.1f} s of its own, where {self._limit:g} s are for each: make it smaller or `long`"
            )
        return result
