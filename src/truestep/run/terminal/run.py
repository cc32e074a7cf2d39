"""Shows a run's metrics. A terminal shows a progress bar, the time left, the curve of the reward and the last step's
metrics, and above them a line for every n-th step. A file gets a line for each step."""

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from truestep.run.terminal.display import Display
from truestep.run.terminal.words import duration
from truestep.text import printable

# The metrics of a plain line, in order, with their formats.
_PLAIN = {
    "reward": "reward {:.3f}",
    "loss": "loss {:+.4f}",
    "new_logprobs": "logπ {:.3f}",
    "ratio_new_old": "ratio {:.4f}",
    "clipped_ratio_fraction": "clipped {:.1%}",
    "grad_norm": "grad {:.3g}",
    "tokens_per_second": "{:,.0f} tok/s",
    "response_length": "length {:,.1f}",
    "policy_turns": "turns {:.1f}",
    "kl_new_old": "kl {:.1e}",
}
# The metrics always shown on a terminal, over several lines if it is narrow; `_WIDE` has more for a wide one.
_ALWAYS = {
    "reward": "reward {:.3f}",
    "loss": "loss {:+.4f}",  # only without a reward
    "response_length": "length {:,.1f}",
    "kl_new_old": "kl {:.1e}",
    "grad_norm": "grad {:.3g}",
    "tokens_per_second": "{:,.0f} tok/s",
}
_WIDE = {
    "policy_turns": "turns {:.1f}",
    "loss": "loss {:+.4f}",
    "entropy": "entropy {:.3f}",
    "clipped_ratio_fraction": "clipped {:.1%}",
    "truncated_fraction": "truncated {:.1%}",
    "step_time": "{:.1f} s a step",
    "ratio_new_old": "ratio {:.4f}",
    "learning_rate": "lr {:.2e}",
    "new_logprobs": "logπ {:.3f}",
    "gpu_memory": "{:.1f} GiB",
    "mfu": "mfu {:.1%}",
}

_RATIO_TOLERANCE = 1e-3
_TIMED = 20  # the last steps, from which the time left is estimated
_GAP = "  "
_KEPT_LINES = 50  # the most lines of steps that stay above a terminal's changing lines
_CURVE = "▁▂▃▄▅▆▇█"
_MEANS = 80  # the most means that are kept for a curve
_HUGE = 1e200  # larger values are drawn as this one, so that sums and differences stay finite
_PARTS = "rewards/"  # prefix of the metrics of the reward's parts


def live_line(line: Mapping[str, Any], width: int | None = None) -> str:
    """Format the metrics of a plain line, with the parts of the reward. `width`: leave out the last ones that do not
    fit."""
    cells = {name: form.format(line[name]) for name, form in _PLAIN.items() if line.get(name) is not None}
    parts = [name for name in line if name.startswith(_PARTS) and line[name] is not None]
    reward = [cells.pop("reward")] if "reward" in cells else []
    of_parts = [f"{printable(name.removeprefix(_PARTS))} {line[name]:.3f}" for name in parts]
    text = ""
    for cell in (*reward, *of_parts, *cells.values()):
        longer = f"{text}{_GAP}{cell}" if text else cell
        if width is not None and cell_len(longer) > width:
            break
        text = longer
    return text


class Trend:
    """The finite values of a metric: the first, the last, and at most `_MEANS` means of equally many of them."""

    def __init__(self) -> None:
        self.first = self.last = math.nan
        self._means: list[float] = []
        self._each = 1  # number of values in a mean
        self._sum, self._count = 0.0, 0  # of the values that are in no mean yet

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        self.first, self.last = value if math.isnan(self.first) else self.first, value
        self._sum += max(-_HUGE, min(_HUGE, value))
        self._count += 1
        if self._count < self._each:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == _MEANS:
            self._means = [(one + other) / 2 for one, other in zip(self._means[::2], self._means[1::2], strict=True)]
            self._each *= 2

    def curve(self, columns: int) -> str:
        """Draw the values as blocks, each the mean of about equally many values. A single value has no curve."""
        values = [*self._means, self._sum / self._count] if self._count else self._means
        if len(values) < 2 or columns < 2:
            return ""
        columns = min(columns, len(values))
        edges = [len(values) * column // columns for column in range(columns + 1)]
        means = [statistics.fmean(values[start:end]) for start, end in pairwise(edges)]
        low, high = min(means), max(means)
        scale = (len(_CURVE) - 1) / (high - low) if high > low else 0.0
        return "".join(_CURVE[round((mean - low) * scale)] for mean in means)


def number_lines(line: Mapping[str, Any], width: int) -> list[str]:
    """Format a step's metrics in lines of at most `width` columns: those of `_ALWAYS`, then of `_WIDE` if they fit."""
    always = [name for name in _ALWAYS if line.get(name) is not None]
    if "reward" in always:
        always.remove("loss") if "loss" in always else None
    lines: list[str] = []
    for name in always:
        cell = _ALWAYS[name].format(line[name])
        if lines and len(lines[-1]) + len(_GAP) + len(cell) <= width:
            lines[-1] += _GAP + cell
        else:
            lines.append(cell)
    for name, form in _WIDE.items() if lines else ():
        if name in always or line.get(name) is None:
            continue
        longer = lines[-1] + _GAP + form.format(line[name])
        if len(longer) > width:  # do not try shorter metrics: they would move when the terminal is resized
            break
        lines[-1] = longer
    return lines


class ConsoleSink:
    """Shows a run's steps and evaluations on a terminal or in a file."""

    def __init__(
        self, display: Display, *, steps: int | None, done: int = 0, title: str = "training", sets: Sequence[str] = ()
    ):
        """`sets`: the names of the sets of held-out prompts."""
        self._sets = sets
        self._display, self._steps, self._title = display, steps, title
        self._line: Mapping[str, Any] = {"step": done}
        self._start = time.monotonic()
        self._ends: deque[tuple[int, float]] = deque([(done, self._start)], maxlen=_TIMED + 1)
        self._computed: deque[float] = deque(maxlen=_TIMED)  # seconds of steps without the wait for their documents
        self._trends = {"reward": Trend(), "loss": Trend()}  # the first with a curve is drawn
        utf8 = display.console.encoding.startswith("utf")
        self._full, self._empty = ("━", "╌") if utf8 else ("#", "-")
        self._draws = utf8
        display.lines = self.lines
        display.computing_takes = lambda: statistics.median(self._computed) if self._computed else None

    def step(self, line: Mapping[str, Any]) -> None:
        self._line = line
        self._ends.append((line["step"], time.monotonic()))
        self._note(line)
        if not self._display.live or self._is_kept(line["step"]):
            total = f"/{self._steps}" if self._steps else ""
            head = f"step {line['step']}{total}{_GAP}"
            width = self._display.console.size.width - len(head) if self._display.live else None
            self._display.say(head + live_line(line, width))
        ratio = line.get("ratio_new_old")
        if line["step"] == 1 and ratio is not None and not abs(ratio - 1) <= _RATIO_TOLERANCE:
            warning = Text("warning:", style="bold yellow").append(
                f" ratio_new_old is {ratio:.4f} at step 1, before any update: policy and sampler do not give "
                "the same probabilities (temperature, head precision, other weights, or rollouts of an older policy)",
                style="not bold default",
            )
            self._display.say(warning)

    def _note(self, line: Mapping[str, Any]) -> None:
        """Keep the values of a step that the curve and the estimates need."""
        if line.get("step_time") is not None:
            self._computed.append(max(0.0, line["step_time"] - (line.get("data_wait_time") or 0.0)))
        for name, trend in self._trends.items():
            trend.add(line.get(name))

    def _is_kept(self, step: int) -> bool:
        """Tell whether a step's line stays in a terminal: every n-th, so that a run has at most `_KEPT_LINES`. A run
        of unknown length keeps steps 1, 2, ... 9, then 10, 20, ... 90, then 100, 200, ... 900 and so on."""
        if self._steps is None:
            return bool(step % 10 ** (len(str(step)) - 1) == 0)
        rounds = (n * 10**power for power in range(20) for n in (1, 2, 5))
        every = next(n for n in rounds if self._steps <= _KEPT_LINES * n)
        return step % every == 0 or step == self._steps

    def evaluation(self, line: Mapping[str, Any]) -> None:
        if "loss" in line:
            text = f"held-out after step {line['step']}: loss {line['loss']:.4f} over {line['num_labels']} labels"
            self._display.say(text)
            return
        text = f"held-out after step {line['step']}: {_rewards(line, '')} over {line['num_prompts']} prompts"
        longest = max(map(cell_len, self._sets), default=0) + 1
        said = [text, *(f"  {set_cell_size(f'{name}:', longest)} {_rewards(line, f'{name}/')}" for name in self._sets)]
        if line["num_unrated"]:
            problems = "; ".join(printable(problem) for problem in line.get("problems", []))
            said.append(f"  {line['num_unrated']} completions have no reward: {problems}")
        self._display.say("\n".join(printable(part, 2000) for part in said))

    def close(self) -> None:
        """Do nothing: the display shows the last metrics until the command ends."""

    def lines(self, width: int) -> list[Text]:
        """Return the lines for a terminal of this width."""
        numbers = [Text(line, style="bold", no_wrap=True) for line in number_lines(self._line, width)]
        return [self._bar(width), *self._trend(width), *numbers]

    def _trend(self, width: int) -> list[Text]:
        """Return the line with the curve of the reward, or of the loss if there is none."""
        for name, trend in self._trends.items() if self._draws else ():
            ends = f"{trend.first:.3f} → {trend.last:.3f}"
            if drawn := trend.curve(min(40, width - len(name) - len(ends) - 2 * len(_GAP))):
                return [Text(f"{name}{_GAP}", no_wrap=True).append(drawn, "green").append(_GAP + ends)]
        return []

    def _bar(self, width: int) -> Text:
        step, steps = self._line["step"], self._steps
        times = f"{duration(time.monotonic() - self._start)} gone"
        left = self._seconds_left()
        if left is not None:
            times += f", {duration(left)} left"
        count = f"{step:,}/{steps:,}" if steps else f"step {step:,}"
        bar = Text(self._title, style="bold", no_wrap=True)
        room = width - len(self._title) - len(count) - len(times) - 3 * len(_GAP)
        if steps and room >= 6:
            room = min(room, 40)
            full = min(room, room * step // steps)
            bar.append(_GAP).append(self._full * full, "green").append(self._empty * (room - full), "not bold dim")
        return bar.append(_GAP + count).append(_GAP + times, "not bold")

    def _seconds_left(self) -> float | None:
        """Estimate the time left from the last steps, including the evaluations and checkpoints between them."""
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        if self._steps is None or last <= first or last >= self._steps:
            return None
        since = time.monotonic() - end
        return max(0.0, (self._steps - last) * (end - start) / (last - first) - since)


def _rewards(line: Mapping[str, Any], prefix: str) -> str:
    """Format the held-out rewards of a set of prompts, and its pass@k for the largest k. `prefix`: "" for all sets."""
    passed = [key for key in line if re.fullmatch(rf"{re.escape(prefix)}pass@\d+", key)]
    asked = {"greedy": f"{prefix}greedy_reward", "sampled": f"{prefix}sampled_reward"}
    asked |= {key.removeprefix(prefix): key for key in passed[-1:]}
    return ", ".join(f"{kind} {_with_error(line, key)}" for kind, key in asked.items())


def _with_error(line: Mapping[str, Any], key: str) -> str:
    """Format a mean with its 95% interval. An interval of pass@k that leaves [0, 1] is cut and shown as two ends."""
    value, half_width = line[key], line.get(f"{key}_ci")
    if value is None:
        return "none could be rated"
    if half_width is None:
        return f"{value:.3f}"
    low, high = value - half_width, value + half_width
    if "pass@" in key and (low < 0 or high > 1):
        return f"{value:.3f} ({max(0.0, low):.3f} to {min(1.0, high):.3f})"
    return f"{value:.3f} ±{half_width:.3f}"
