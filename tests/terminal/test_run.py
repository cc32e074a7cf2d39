"""What a person sees of a run: plain lines in a file, a bar and numbers on a terminal of any width."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from truestep.run.terminal.display import Display
from truestep.run.terminal.run import ConsoleSink, Trend, live_line, number_lines
from truestep.text import printable

EVALUATION = {
    "step": 2,
    "documents_seen": 16,
    "num_prompts": 4,
    "greedy_reward": 0.5,
    "sampled_reward": 0.25,
    "num_unrated": 0,
    "seconds": 0.1,
    "examples": [{"prompt": "[bold]p[/]", "completion": "c", "reward": 1.0}],
}
HELD_OUT = "held-out after step 2: greedy 0.500, sampled 0.250 over 4 prompts"
TELLING = ("reward 0.750", "length 48.5", "kl 1.2e-03", "grad 12.5", "12,346 tok/s")


def step_line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": -0.125 * step,
        "reward": 0.75,
        "new_logprobs": -1.5,
        "ratio_new_old": 1.0001,
        "clipped_ratio_fraction": 0.25,
        "grad_norm": 12.5,
        "tokens_per_second": 12345.6,
        "documents_seen": 8 * step,
        "response_length": 48.5,
        "kl_new_old": 1.234e-3,
        "entropy": 0.5,
        "truncated_fraction": 0.0,
        "step_time": 3.25,
        "learning_rate": 1e-6,
        "gpu_memory": 17.2,
        "mfu": 0.41,
        **more,
    }


def plain(width: int = 80) -> tuple[Display, io.StringIO]:
    written = io.StringIO()
    return Display(Console(file=written, width=width)), written


def test_a_file_gets_a_plain_line_a_step() -> None:
    display, written = plain(width=40)
    sink = ConsoleSink(display, steps=9)
    with display:
        for step in (1, 2):
            sink.step(step_line(step))
        sink.evaluation(EVALUATION)
        sink.close()
    first, second, evaluation = written.getvalue().splitlines()
    assert first == f"step 1/9  {live_line(step_line(1))}"
    assert second.startswith("step 2/9  reward 0.750  loss -0.2500")
    assert evaluation == HELD_OUT
    assert "\x1b" not in written.getvalue()


def test_an_evaluation_without_a_mean_is_shown_as_such() -> None:
    display, written = plain(width=300)
    unrated = EVALUATION | {"greedy_reward": None, "num_unrated": 4, "problems": ["the reward raised KeyError"]}
    ConsoleSink(display, steps=None).evaluation(unrated)
    assert "greedy none could be rated, sampled 0.250" in written.getvalue()
    assert "4 completions have no reward: the reward raised KeyError" in written.getvalue()


def test_a_source_may_have_the_name_of_a_metric() -> None:
    display, written = plain(width=300)
    sink = ConsoleSink(display, steps=None, sets=["a"])
    of_a = {f"a/{name}": value for name, value in EVALUATION.items() if "reward" in name or name == "num_prompts"}
    sink.evaluation(EVALUATION | of_a | {"a/greedy_reward/num_prompts": 0.5})
    whole, of_set = written.getvalue().splitlines()
    assert whole == HELD_OUT and of_set == "  a: greedy 0.500, sampled 0.250"


def test_a_line_shows_what_there_is() -> None:
    assert live_line({"step": 1, "loss": 0.5, "entropy": 3.0}) == "loss +0.5000"
    assert live_line({"step": 1, "loss": math.nan, "grad_norm": math.inf}) == "loss +nan  grad inf"
    assert live_line({}) == ""
    parts = {"rewards/right": 0.5, "reward": 0.75, "rewards/short": None, "rewards/form": 0.25, "loss": 0.5}
    assert live_line(parts) == "reward 0.750  right 0.500  form 0.250  loss +0.5000"
    assert live_line(parts, 40) == live_line(parts, 39) == "reward 0.750  right 0.500  form 0.250"
    assert live_line(parts, 12) == "reward 0.750"
    assert live_line({"response_length": 30.0, "policy_turns": 2.5, "turns": 4.0}) == "length 30.0  turns 2.5"
    assert number_lines({"step": 3}, 80) == []
    assert number_lines({"loss": 0.5, "grad_norm": math.inf}, 80) == ["loss +0.5000  grad inf"]


@pytest.mark.parametrize(("ratio", "warned"), [(1.0, False), (1.0005, False), (0.99, True), (float("nan"), True)])
def test_a_ratio_off_at_step_one_is_a_warning(ratio: float, warned: bool) -> None:
    display, written = plain()
    sink = ConsoleSink(display, steps=3)
    sink.step({"step": 1, "ratio_new_old": ratio})
    sink.step({"step": 2, "ratio_new_old": 0.5})
    assert written.getvalue().count("warning:") == warned


def test_a_wider_terminal_shows_more_and_nothing_is_lost() -> None:
    display, _ = plain()
    sink = ConsoleSink(display, steps=3000, done=1000)
    for step in (1001, 1002):
        sink.step(step_line(step))
    before: set[str] = set()
    for width in range(24, 260):
        lines = [line.plain for line in sink.lines(width)]
        if width >= 28:
            assert lines.pop(1) == "reward  ▁▁  0.750 → 0.750"
        assert all(len(line) <= width for line in lines[1:]), (width, lines)
        cells = set("  ".join(lines[1:]).split("  "))
        assert cells >= set(TELLING), (width, cells)
        if width >= 64:  # from here on the telling ones are one line
            assert len(lines) == 2
            assert cells >= before, (width, before - cells)
            before = cells
    assert len(before) == 15, before
    for width in (80, 120, 160):
        bar = sink.lines(width)[0].plain
        assert len(bar) <= width
        assert "1,002/3,000" in bar and " gone, " in bar and " left" in bar


@pytest.mark.parametrize("steps", [None, 4])
def test_the_time_left_is_that_of_the_steps_left(steps: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("truestep.run.terminal.run.time.monotonic", lambda: now[0])
    display, _ = plain()
    sink = ConsoleSink(display, steps=steps)
    assert "left" not in sink.lines(80)[0].plain, "nothing is known before the first step"
    for step in (1, 2):
        now[0] += 90  # with what comes between steps
        sink.step(step_line(step))
    bar = sink.lines(80)[0].plain
    assert bar.endswith("3:00 gone, 3:00 left" if steps else "step 2  3:00 gone")
    now[0] += 30
    assert sink.lines(80)[0].plain.endswith("3:30 gone, 2:30 left" if steps else "3:30 gone")
    for step in (3, 4):
        now[0] += 90
        sink.step(step_line(step))
    assert "left" not in sink.lines(80)[0].plain


def curve(values: Sequence[float | None], columns: int) -> str:
    trend = Trend()
    for value in values:
        trend.add(value)
    return trend.curve(columns)


def test_a_curve_shows_means_of_equally_many_steps() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 40) == "▁▂▃▄▅▆▇█"
    assert curve([0, 2, 10, 12, 0, 2], 3) == "▁█▁"
    assert curve([5.0] * 9, 4) == "▁▁▁▁"
    assert curve([math.nan, 1.0, None, math.inf, 2.0], 40) == "▁█"
    assert curve([1.0], 40) == curve([], 40) == curve([1.0, 2.0], 1) == ""
    assert curve(range(80_000), 8) == "▁▂▃▄▅▆▇█"


def test_a_curve_of_huge_values_is_drawn() -> None:
    assert curve([1e308] * 3, 40) == "▁▁▁"
    assert curve([-1e308, 1e308], 40) == "▁█"
    assert len(curve([1e308, -1e308] * 500, 40)) == 40


def test_a_long_runs_curve_keeps_few_numbers() -> None:
    trend = Trend()
    for value in range(10_000):
        trend.add(value)
        assert len(trend._means) < 80
    assert trend.first == 0 and trend.last == 9999


def test_the_curve_is_of_the_reward_once_there_is_one() -> None:
    display, _ = plain()
    sink = ConsoleSink(display, steps=9)
    for step, reward in enumerate((None, None, 0.25, 0.5, math.nan), 1):
        sink.step({"step": step, "loss": float(step), "reward": reward})
        if step == 3:  # one value is no curve
            assert sink.lines(80)[1].plain == "loss  ▁▅█  1.000 → 3.000"
    assert sink.lines(80)[1].plain == "reward  ▁█  0.250 → 0.500"


@pytest.mark.parametrize("name", ["{", "}", "{0}", "{x!r:>9}", "a\nb"])
def test_a_part_of_the_reward_may_have_any_name(name: str) -> None:
    assert live_line({f"rewards/{name}": 0.5}) == f"{printable(name)} 0.500"


def test_widths_are_those_of_cells() -> None:
    assert live_line({"reward": 0.5, "rewards/正解": 0.5}, 25) == "reward 0.500  正解 0.500"
    assert live_line({"reward": 0.5, "rewards/正解正": 0.5}, 25) == "reward 0.500", "it has 26 cells"
    display, written = plain(width=300)
    sink = ConsoleSink(display, steps=None, sets=["数学", "code"])
    of_sets = {f"{name}/{kind}_reward": 0.5 for name in ("数学", "code") for kind in ("greedy", "sampled")}
    sink.evaluation(EVALUATION | of_sets)
    lines = written.getvalue().splitlines()
    assert lines[1:] == ["  数学: greedy 0.500, sampled 0.500", "  code: greedy 0.500, sampled 0.500"]


def test_the_interval_of_pass_at_k_stays_a_probability() -> None:
    display, written = plain(width=300)
    sink = ConsoleSink(display, steps=None)
    for value, half, said in (
        (0.05, 0.1, "0.050 (0.000 to 0.150)"),
        (0.95, 0.1, "0.950 (0.850 to 1.000)"),
        (0.5, 0.1, "0.500 ±0.100"),
    ):
        sink.evaluation(EVALUATION | {"pass@4": value, "pass@4_ci": half, "greedy_reward_ci": 0.75})
        last = written.getvalue().splitlines()[-1]
        assert f"greedy 0.500 ±0.750, sampled 0.250, pass@4 {said} over" in last


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (3, [1, 2, 3]),
        (50, [*range(1, 51)]),
        (51, [*range(2, 51, 2), 51]),
        (1000, [*range(20, 1001, 20)]),
        (None, [*range(1, 10), *range(10, 100, 10), *range(100, 1000, 100), 1000]),
    ],
)
def test_at_most_fifty_lines_of_steps_stay_in_a_terminal(steps: int | None, kept: list[int]) -> None:
    display, _ = plain()
    sink = ConsoleSink(display, steps=steps)
    assert [step for step in range(1, (steps or 1000) + 1) if sink._is_kept(step)] == kept
