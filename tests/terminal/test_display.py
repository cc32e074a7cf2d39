"""The lines at the bottom of a real pseudo-terminal, what others print above them, and terminals that fail."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from small_runs import file_config, read_lines, write_rollouts
from terminal.screen import PseudoTerminal
from truestep.commands.cli import _print, main
from truestep.config.load import dump_config
from truestep.process import progress
from truestep.ranks.forks import fork_context
from truestep.run.terminal.display import Display
from truestep.run.terminal.run import ConsoleSink


@pytest.fixture
def terminal() -> Iterator[PseudoTerminal]:
    made = PseudoTerminal()
    yield made
    made.close()


def console_on(terminal: PseudoTerminal, width: int = 80) -> Console:
    file = open(os.dup(terminal.slave), "w", encoding="utf-8")  # noqa: SIM115 - the console closes with the test
    return Console(file=file, width=width, color_system=None, force_terminal=True)


def test_work_is_shown_below_messages_and_leaves_when_it_is_done(terminal: PseudoTerminal) -> None:
    progress.phase("waiting for the documents of step 3")
    with Display(console_on(terminal)) as display:
        with progress.working("sampling", "completions", 256):
            progress.made("completions", 112)
            assert terminal.wait_for(lambda text: "step 3: sampling 112/256 completions" in text)
            display.say("a message")
            display.say(Text("another", style="bold"))
            assert terminal.wait_for(lambda text: text.startswith("a message\nanother\nwaiting for the doc"))
        with progress.working("training", "micro-batches", 8):
            progress.made("micro-batches", 2)
            assert terminal.wait_for(lambda text: "training micro-batch 3/8" in text)
    terminal.read()
    assert terminal.screen.lines == ["a message", "another", ""], "only messages stay"


def test_prints_of_others_come_above_the_lines(terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    console = console_on(terminal)
    monkeypatch.setattr(sys, "stdout", console.file)
    progress.phase("computing step 1")
    with Display(console):
        assert terminal.wait_for(lambda text: text.startswith("computing step 1"))
        print("printed by a callback")
        assert terminal.wait_for(lambda text: text.startswith("printed by a callback\ncomputing step 1"))
    terminal.read()
    assert terminal.screen.lines == ["printed by a callback", ""]
    assert sys.stdout is console.file


def test_a_run_that_is_killed_leaves_a_terminal_with_its_cursor(terminal: PseudoTerminal) -> None:
    progress.phase("computing step 1")
    with Display(console_on(terminal)):
        assert terminal.wait_for(lambda text: text.startswith("computing step 1"))
        assert terminal.sent.rfind("\x1b[?25h") > terminal.sent.rfind("\x1b[?25l")  # which hides it


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_left_out_where_that_is_asked_for(terminal: PseudoTerminal, no_color: bool) -> None:
    file = open(os.dup(terminal.slave), "w", encoding="utf-8")  # noqa: SIM115 - the console closes with the test
    console = Console(file=file, width=80, color_system="standard", force_terminal=True, no_color=no_color)
    progress.phase("computing step 1")
    with Display(console):
        assert terminal.wait_for(lambda text: text.startswith("computing step 1"))
    terminal.read()
    assert ("\x1b[36m" in terminal.sent) != no_color  # cyan, of the phase


def test_a_run_on_a_terminal_keeps_its_last_numbers(terminal: PseudoTerminal) -> None:
    display = Display(console_on(terminal))
    with display:
        sink = ConsoleSink(display, steps=3, title="training")
        for step in (1, 2, 3):
            sink.step({"step": step, "reward": 0.25 * step, "loss": 0.5, "ratio_new_old": 1.0})
        sink.evaluation({"step": 3, "loss": 0.5, "num_labels": 12})
        assert terminal.wait_for(lambda text: "3/3" in text)
    terminal.read()
    *steps, evaluation, bar, trend, numbers, rest = terminal.screen.lines
    assert steps == [f"step {step}/3  reward {0.25 * step:.3f}  loss +0.5000  ratio 1.0000" for step in (1, 2, 3)]
    assert trend == "reward  ▁▅█  0.250 → 0.750"
    assert evaluation == "held-out after step 3: loss 0.5000 over 12 labels"
    assert bar.startswith("training  ━") and "3/3" in bar and "╌" not in bar
    assert numbers.startswith("reward 0.750")
    assert not rest


def test_a_message_is_broken_between_words_on_a_terminal_alone(terminal: PseudoTerminal) -> None:
    message = "each word of this message stays whole [red], " * 5
    with Display(console_on(terminal)) as display:
        display.say(message)
        assert terminal.wait_for(lambda text: "whole" in text)
    terminal.read()
    lines = terminal.screen.lines[:-1]
    assert len(lines) == 3 and all(len(line) <= 80 for line in lines)
    assert " ".join(lines).split() == message.split()
    assert all(line.split()[-1] in message.split() for line in lines)
    written = io.StringIO()
    with Display(Console(file=written, width=80)) as display:
        display.say(message)
    assert written.getvalue().startswith(message + "\n"), "a line of a log stays one line"


def test_a_long_word_of_a_message_stays_whole(terminal: PseudoTerminal) -> None:
    path = "/tmp/" + "directory/" * 12
    with Display(console_on(terminal)) as display:
        display.say(f"the run is in {path} now")
        assert terminal.wait_for(lambda text: "now" in text)
    terminal.read()
    assert path in terminal.sent


def test_a_command_to_copy_is_not_broken(terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "next: cd a/directory/with/a/long/name && truestep train config.yaml --checkpoint.directory another"
    with console_on(terminal).file as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setenv("COLUMNS", "40")
        _print(text)
        monkeypatch.undo()
    assert terminal.wait_for(lambda _: text in terminal.sent)


def test_a_file_stays_plain_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    message, written = "each word of this message stays whole, " * 5, io.StringIO()
    with Display(Console(file=written, width=40)) as display:
        display.say(message)
        assert not display.live
    assert written.getvalue() == message + "\n"


def test_stopping_says_how_long_the_step_takes_where_that_is_known() -> None:
    now = [time.monotonic()]
    display = Display(Console(file=io.StringIO()), clock=lambda: now[0])
    sink = ConsoleSink(display, steps=9)
    progress.phase("computing step 3")
    assert display._ends_in() == ""
    for step, seconds in enumerate((40.0, 40.0, 42.0), 1):
        sink.step({"step": step, "step_time": seconds + 10, "data_wait_time": 10.0})
    began = progress.current_phase()[1]
    now[0] = began + 15
    assert display._ends_in() == " (about 0:25, judging by the last steps)"
    now[0] = began + 100
    assert display._ends_in() == "", "the step takes longer than the last ones"
    progress.phase("waiting for the documents of step 4")
    assert display._ends_in() == "", "sampling is interrupted"


def test_no_fault_of_a_terminal_reaches_the_run(terminal: PseudoTerminal) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def isatty(self) -> bool:
            return True

    for console in (Console(file=Broken(), force_terminal=True), Console(file=Broken(), force_terminal=False)):
        with Display(console) as display:
            sink = ConsoleSink(display, steps=2)
            for step in (1, 2):
                sink.step({"step": step, "loss": 0.1})
                display.say("a message")
                time.sleep(0.3)
    with Display(console_on(terminal)) as display:
        display.lines = lambda width: [][width]  # type: ignore[assignment]
        time.sleep(0.5)
        display.say("still here")


def test_a_terminal_that_stands_still_holds_nobody_up(
    terminal: PseudoTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads: once its buffer is full, a write would wait for ever."""
    monkeypatch.setattr("truestep.run.terminal.display._PATIENCE", 0.2)
    display = Display(console_on(terminal))
    with display:
        for number in range(300):
            display.say(f"message {number} " + "x" * 1000)  # far more than the terminal's buffer holds
        time.sleep(0.5)
        display.say("said at once")
    assert display._broken
    terminal.read()  # lets the thread end


def test_what_is_no_terminal_gets_plain_lines_only() -> None:
    written = io.StringIO()
    with Display(Console(file=written)) as display, progress.working("sampling", "completions", 3):
        display.asked_to_stop = lambda: int(signal.SIGINT)
        display.say("a message")
        time.sleep(0.6)
    first, second = written.getvalue().splitlines()
    assert first == "a message"
    assert second.startswith("stopping (Ctrl-C): the work in hand ends first")
    assert "\x1b" not in written.getvalue()


def _command_on(name: str, arguments: list[str]) -> None:
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # the first one that a session opens is the one whose Ctrl-C it gets
    for handle in (0, 1, 2):
        os.dup2(terminal, handle)
    os.environ.pop("COLUMNS", None)
    os.environ["TERM"] = "xterm"
    main(arguments, prog_name="truestep")


def test_a_run_at_a_terminal_is_shown_stopped_and_gone_on_with(tiny_model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_rollouts(tmp_path / "r.jsonl", 20)
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run")
    shown = config.model_copy(update={"logging": config.logging.model_copy(update={"console": True})})
    endless = shown.model_copy(update={"data": config.data.model_copy(update={"epochs": 10_000})})
    (tmp_path / "run.yaml").write_text(dump_config(endless))
    terminal = PseudoTerminal(width=200)
    process = fork_context().Process(target=_command_on, args=(terminal.name, ["train", str(tmp_path / "run.yaml")]))
    process.start()
    try:
        assert terminal.wait_for(lambda text: "documents: 20 of" in text and "\nreward " in text), terminal.screen.text
        for said in ("run: grpo", "(LlamaForCausalLM)", "device: cpu", "memory planned: "):
            assert said in terminal.screen.text
        terminal.type(b"\x03")
        assert terminal.wait_for(lambda text: "stopping (Ctrl-C): the work in hand ends first" in text)
        assert terminal.wait_for(lambda text: "go on from here:" in text), terminal.screen.text
        process.join(100)
    finally:
        process.kill()
        process.join()
        terminal.close()
    assert process.exitcode == 130
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")]
    assert (
        f"stopped by Ctrl-C (SIGINT) after step {steps[-1]}; the same command goes on from here" in terminal.screen.text
    )
    assert f"go on from here:               truestep train {tmp_path / 'run.yaml'}" in terminal.screen.text
    assert (tmp_path / "run/checkpoints" / f"step-{steps[-1]:08d}").is_dir()
