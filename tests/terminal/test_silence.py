"""A file is told what a run does: at the start, once for each kind of work, and after a long silence."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

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
        assert passed(display, clock, 2000, written) == [1, 10, 30, 70, 150, 310, 630, 1230, 1830]
    start, first, second, *_ = written.getvalue().splitlines()
    assert start == "waiting for the documents of step 1: rating 3/32 rewards  0:01"
    assert first == "waiting for the documents of step 1: rating 3/32 rewards  0:10"
    assert second.endswith("rating 3/32 rewards  0:30")


def test_steps_that_all_take_long_are_no_silence(clock: Clock) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=80), clock)
    for step in range(1, 6):
        lines = passed(display, clock, 60, written)
        assert lines == ([1, 10, 30] if step == 1 else [])
        display.say(f"step {step}")
    assert passed(display, clock, 500, written) == [120, 360]


def test_quick_steps_are_as_they_were(clock: Clock) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=80), clock)
    progress.phase("")
    for step in range(50):
        assert passed(display, clock, 2, written) == []
        display.say(f"step {step}")
    assert len(written.getvalue().splitlines()) == 50


def test_servers_that_are_slow_are_named(clock: Clock) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=80), clock)
    progress.phase("waiting for the documents of step 2")
    with progress.waiting_for("completions from the inference servers"):
        assert passed(display, clock, 12, written) == [1, 10]
    line = written.getvalue().splitlines()[-1]
    assert line == "waiting for the documents of step 2: waiting for completions from the inference servers  0:10"


def test_a_quiet_console_stays_quiet(clock: Clock) -> None:
    written = io.StringIO()
    assert passed(Display(Console(file=written, quiet=True), clock), clock, 100, written) == []


def test_each_kind_of_work_gets_a_line_once_when_it_takes_seconds(clock: Clock) -> None:
    written = io.StringIO()
    progress.phase("")
    display = Display(Console(file=written, width=80), clock)
    seen = []
    for phase, seconds in (
        ("starting", 4),  # at once
        ("loading the model", 3),
        ("reading the data", 1),  # too short for a line
        ("computing step 1", 3),
        ("saving after step 1", 1),
        ("computing step 2", 4),  # the same kind
        ("saving after step 2", 3),
    ):
        progress.phase(phase)
        seen.append(passed(display, clock, seconds, written))
        display._silence.said(clock.now)  # the run's own lines are no part of this test
    assert seen == [[1], [2], [], [2], [], [], [2]]
    words = [line.split("  ")[0] for line in written.getvalue().splitlines()]
    assert words == ["starting", "loading the model", "computing step 1", "saving after step 2"]


def test_a_later_display_does_not_repeat_the_line_of_an_earlier_one(clock: Clock) -> None:
    written = io.StringIO()
    progress.phase("starting")
    assert passed(Display(Console(file=written, width=80), clock), clock, 5, written) == [1]
    assert passed(Display(Console(file=written, width=80), clock), clock, 5, written) == []


@pytest.mark.long  # imports torch in a process of its own
def test_the_first_line_of_a_command_does_not_wait_for_torch(tmp_path: Path) -> None:
    program = (
        "import sys, threading, truestep.commands.cli as cli\n"
        "from truestep.run.terminal.display import Display\n"
        "say, torch_there = Display._print, []\n"
        "def noted(display, message):\n"
        "    torch_there.append('torch.nn' in sys.modules)\n"
        "    say(display, message)\n"
        "Display._print = noted\n"
        "try:\n"
        f"    cli.main(['train', {str(tmp_path / 'run.yaml')!r}])\n"
        "finally:\n"
        "    print('first line before torch:', not torch_there[0])\n"
    )
    (tmp_path / "run.yaml").write_text("model: {path: nowhere}\ndata: {path: nothing.jsonl}\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert "first line before torch: True" in done.stdout, (done.stdout, done.stderr)
    assert done.stderr.splitlines()[0].startswith("starting"), done.stderr
