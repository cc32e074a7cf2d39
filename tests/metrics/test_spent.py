"""The parts of a step's time, by a clock of the test's own."""

from __future__ import annotations

import pytest

from truestep.metrics import spent
from truestep.metrics.spent import StepTimes, Stopwatch, of_the_machine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(spent.time, "perf_counter", lambda: now[0])
    return now


def test_a_piece_within_another_counts_for_itself_alone(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    with stopwatch.measure("forward"):
        clock[0] += 1
        with stopwatch.measure("head"):
            clock[0] += 10
        clock[0] += 2
    clock[0] += 1000
    with pytest.raises(ValueError, match="failed"), stopwatch.measure("backward"):
        clock[0] += 4
        raise ValueError("failed")
    with stopwatch.measure("forward"):
        clock[0] += 5
    assert stopwatch.drain() == {"forward": 8, "head": 10, "backward": 4}
    assert stopwatch.drain() == {}


def test_the_parts_add_up_to_the_step(clock: list[float]) -> None:
    times = StepTimes()
    for name, seconds in (("evaluation", 50), ("save", 20), ("reference", 3), ("sync", 1), ("save", 5)):
        with times.measure(name):
            clock[0] += seconds
    waits = {"data_wait_time": 9.0, "sampling_time": 6.0, "rating_time": 1.0, "sampled_tokens_per_second": 7.0}
    line = times.line(30.0, waits, {"forward": 4.0, "head": 2.0, "backward": 8.0, "optimizer": 1.0})
    assert line == {
        "time/sampling": 6, "time/rating": 1, "time/waiting": 2, "time/reference": 3, "time/forward": 4,
        "time/head": 2, "time/backward": 8, "time/optimizer": 1, "time/sync": 1, "time/other": 2,
        "time/evaluation": 50, "time/save": 25,
    }  # fmt: skip
    assert sum(value for name, value in line.items() if name not in ("time/evaluation", "time/save")) == 30
    assert times.line(1.0, {"data_wait_time": 0.5}, {}) == {"time/waiting": 0.5, "time/other": 0.5}
    assert all(map(of_the_machine, line)) and not of_the_machine("loss")
