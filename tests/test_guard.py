"""The guard of tests/guard.py: what it charges a case for, and whom it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from guard import Guard, own_seconds, ready_seconds, running
from truestep.ranks.processes import usable_cores


@pytest.mark.parametrize(
    ("clock", "ready", "crowd", "own"),
    [
        (4.0, 0.0, 0.5, 4.0),  # alone
        (4.0, 0.0, 0.0, 4.0),  # asleep all the time, or on a machine that does not tell
        (4.0, 0.0, 1.0, 4.0),  # a core for each
        (12.0, 0.0, 3.0, 4.0),  # it waits for ranks, which have a third of a core each
        (12.0, 8.0, 2.0, 4.0),  # it computes itself, and others come before it
    ],
)
def test_own_seconds_are_those_of_a_machine_with_a_core_for_each(
    clock: float, ready: float, crowd: float, own: float
) -> None:
    assert own_seconds(clock, ready, crowd) == own


def test_time_without_a_core_is_counted() -> None:
    assert 0 <= ready_seconds() <= time.monotonic()


def test_processes_that_compute_are_counted() -> None:
    assert running("cpu  1 2 3\nctxt 77\nprocs_running 5\nprocs_blocked 1\n") == 5


class Outcomes:
    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.by_name[report.nodeid.rpartition("::")[2]] = f"{report.outcome} {report.longreprtext}"


CASES = """
import time, pytest
def test_quick(): pass
def test_slow(): time.sleep(0.5)
@pytest.mark.long
def test_marked(): time.sleep(0.5)
def test_wrong(): assert False, "of its own"
"""


@pytest.fixture
def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Guard], dict[str, str]]:
    def run(guard: Guard) -> dict[str, str]:
        (tmp_path / "test_some.py").write_text(CASES, encoding="utf-8")
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: slow\n", encoding="utf-8")
        seen = Outcomes()
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(tmp_path)]
        pytest.main([str(tmp_path), *options], plugins=[guard, seen])
        return seen.by_name

    return run


def test_a_slow_case_that_is_not_marked_fails(outcomes: Callable[[Guard], dict[str, str]]) -> None:
    guard = Guard(limit=0.4)
    guard._machine = Quiet()  # type: ignore[assignment]
    found = outcomes(guard)
    assert found["test_quick"].startswith("passed") and found["test_marked"].startswith("passed")
    assert "of its own, where 0.4 s are for each" in found["test_slow"]
    assert "assert False" in found["test_wrong"]


def test_a_machine_with_much_to_do_is_not_held_against_a_case(outcomes: Callable[[Guard], dict[str, str]]) -> None:
    guard = Guard(limit=0.4)
    guard._machine = Busy()  # type: ignore[assignment]
    assert outcomes(guard)["test_slow"].startswith("passed")


class Quiet:
    def seen(self) -> tuple[int, int]:
        return 0, 0


class Busy:
    """Three processes for each core at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def seen(self) -> tuple[int, int]:
        self.looks += 1
        return self.looks, 3 * usable_cores() * self.looks


def test_where_far_too_many_compute_nobody_is_failed(outcomes: Callable[[Guard], dict[str, str]]) -> None:
    guard = Guard(limit=0.0)
    guard._machine = Crowd()  # type: ignore[assignment]
    assert outcomes(guard)["test_slow"].startswith("passed")


class Crowd(Busy):
    def seen(self) -> tuple[int, int]:
        self.looks += 1
        return self.looks, 5 * usable_cores() * self.looks
