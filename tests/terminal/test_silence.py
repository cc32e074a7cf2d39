"""A file is told what a run does where there has been no line for long, at growing intervals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from truestep.process import progress
from truestep.run.terminal.display import Display


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("truestep.process.progress.time.monotonic", made)
    return made


def passed(display: Display, clock: Clock, seconds: int, written: io.StringIO) -> list[int]:
    """Let seconds pass, each with a look of the display, and give those after which there was a line."""
    lines = []
    for second in range(1, seconds + 1):
        clock.now += 1
        before = written.tell()
        display._look()
        if written.tell() > before:
            lines.append(second)
    return lines


def test_a_reward_that_sleeps_is_named_with_how_far_it_is(clock: Clock) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=80), clock)
    progress.phase("waiting for the documents of step 1")
    with progress.working("rating", "rewards", 32):
        progress.made("rewards", 3)
        assert passed(display, clock, 2000, written) == [10, 30, 70, 150, 310, 630, 1230, 1830]
    first, second, *_ = written.getvalue().splitlines()
    assert first == "waiting for the documents of step 1: rating 3/32 rewards  0:10"
    assert second.endswith("rating 3/32 rewards  0:30")


def test_steps_that_all_take_long_are_no_silence(clock: Clock) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=80), clock)
    for step in range(1, 6):
        lines = passed(display, clock, 60, written)
        assert lines == ([10, 30] if step == 1 else [])
        display.say(f"step {step}")
    assert passed(display, clock, 500, written) == [120, 360]


def test_quick_steps_are_as_they_were(clock: Clock) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=80), clock)
    for step in range(50):
        assert passed(display, clock, 2, written) == []
        display.say(f"step {step}")
    assert len(written.getvalue().splitlines()) == 50


def test_servers_that_are_slow_are_named(clock: Clock) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=80), clock)
    progress.phase("waiting for the documents of step 2")
    with progress.waiting_for("completions from the inference servers"):
        assert passed(display, clock, 12, written) == [10]
    line = written.getvalue().strip()
    assert line == "waiting for the documents of step 2: waiting for completions from the inference servers  0:10"


def test_a_quiet_console_stays_quiet(clock: Clock) -> None:
    written = io.StringIO()
    assert passed(Display(Console(file=written, quiet=True), clock), clock, 100, written) == []
