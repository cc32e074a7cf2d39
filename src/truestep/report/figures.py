"""The key numbers of a run, for its tiles or its column of the comparison."""

import math
import statistics
from dataclasses import dataclass

import numpy as np

from truestep.metrics.best import PREFIX, Best, step_by_name
from truestep.report.formats import format_compact, format_duration, format_number
from truestep.report.runs import Run, is_finite
from truestep.report.tables import Table
from truestep.text import printable

ARROW = "\N{RIGHTWARDS ARROW}"
RATIO_KEYS = ("ratio_new_old", "min_ratio_new_old", "max_ratio_new_old")


@dataclass(frozen=True)
class Figure:
    """A number with a label and a note."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class FirstRatio:
    """The ratio of new to old probabilities at the first logged step, which should be 1 before any update."""

    step: float
    ratio: float
    # The largest deviation from 1 among the step's mean, smallest and largest ratio.
    worst: float
    # The root mean square of (ratio - 1) over tokens. The mean ratio alone is not enough: if tokens were sampled from
    # the old policy, its expectation is 1, however different the two policies are.
    spread: float | None


def first_ratio(run: Run) -> FirstRatio | None:
    """Return the ratio of the first step that logs one, even if it is NaN."""
    places, values = run.metrics.column("ratio_new_old")
    if not len(places):
        return None
    place = int(places[0])
    ratios = [value for key in RATIO_KEYS if (value := run.metrics.value(place, key)) is not None]
    deviations = [abs(value - 1) for value in ratios]
    worst = math.nan if any(math.isnan(value) for value in deviations) else max(deviations)
    return FirstRatio(float(run.metrics.steps[place]), float(values[0]), worst, _ratio_spread(run.metrics, place))


def _ratio_spread(table: Table, place: int) -> float | None:
    keys = ("ratio_new_old_sum", "ratio_new_old_squared_sum", "num_labels")
    total, squares, count = (table.value(place, key) for key in keys)
    if not (is_finite(total) and is_finite(squares) and is_finite(count)) or count <= 0:
        return None
    # The sums must be sums over tokens, so their total must be near the number of tokens. With another normalization,
    # the spread is unknown.
    if not 0.5 < total / count < 2:
        return None
    return math.sqrt(max(0.0, (squares - 2 * total + count) / count))


def held_out_rewards(run: Run, key: str) -> list[float]:
    rewards: list[float] = run.evaluation_points(key).present.tolist()
    return rewards


def facts(run: Run) -> list[Figure]:
    """List the numbers about the size of the run: steps, documents, tokens, time."""
    tokens, rates, times = run.values("num_tokens"), run.values("tokens_per_second"), run.values("step_time")
    seconds = run.evaluations.column("seconds")[1]
    evaluation = seconds[np.isfinite(seconds)].tolist()
    return [
        Figure("Steps", format_number(len(run.metrics))),
        Figure("Documents", format_number(max(run.documents_at.values(), default=None))),
        Figure("Tokens", format_compact(sum(tokens) if tokens else None)),
        Figure("Time in steps", format_duration(sum(times) if times else None)),
        Figure("Time in evaluations", format_duration(sum(evaluation) if evaluation else None)),
        Figure("Median tokens/s", format_compact(statistics.median(rates) if rates else None)),
    ]


def tiles(run: Run, with_best: bool = False) -> list[Figure]:
    """List the numbers about the result of the run: rewards, ratios, gradient norm, rejected records, the best
    checkpoint."""
    recent = run.values("reward")[-10:]
    rejected = run.rejected.total
    clipped, norms = run.values("clipped_ratio_fraction"), run.values("grad_norm")
    return [
        _held_out_tile(run, "greedy_reward", "Held-out reward, greedy"),
        _held_out_tile(run, "sampled_reward", "Held-out reward, sampled"),
        Figure(
            "Final training reward",
            format_number(run.last("reward")),
            f"mean of the last {len(recent)}: {format_number(statistics.fmean(recent))}" if recent else "",
        ),
        _first_ratio_tile(run),
        Figure("Last ratio new/old", format_ratio(run.last("ratio_new_old")), _last_step(run)),
        Figure(
            "Clipped fraction, last",
            format_percent(run.last("clipped_ratio_fraction")),
            f"largest: {format_percent(max(clipped))}" if clipped else "",
        ),
        Figure(
            "Gradient norm, median",
            format_number(statistics.median(norms) if norms else None, 3),
            f"largest: {format_number(max(norms), 3)}" if norms else "",
        ),
        Figure("Rejected records", format_number(rejected), "reasons below" if rejected else ""),
        *([best_tile(run)] if with_best else []),
    ]


def _first_ratio_tile(run: Run) -> Figure:
    label, first = "|ratio \N{MINUS SIGN} 1|", first_ratio(run)
    if first is None:
        return Figure(label, format_number(None))
    spread = f"over tokens (RMS): {format_deviation(first.spread)}" if first.spread is not None else ""
    return Figure(f"{label} at step {format_number(first.step)}", format_deviation(first.worst), spread)


def _held_out_tile(run: Run, key: str, label: str) -> Figure:
    rewards = held_out_rewards(run, key)
    if not rewards:
        return Figure(label, format_number(None))
    if len(rewards) == 1:
        return Figure(label, format_reward(rewards[0]), "one evaluation")
    rise = rewards[-1] - rewards[0]
    change = ("+" if rise >= 0 else "") + format_reward(rise)
    last = len(run.evaluations) - 1
    prompts, error = run.evaluations.value(last, "num_prompts"), run.evaluations.value(last, f"{key}_ci")
    over = f" over {format_number(prompts)} prompts" if prompts else ""
    interval = f" \N{PLUS-MINUS SIGN}{format_reward(error)}" if is_finite(error) else ""  # 95% confidence
    return Figure(label, f"{format_reward(rewards[0])} {ARROW} {format_reward(rewards[-1])}{interval}", change + over)


def keeps_best(run: Run) -> bool:
    return run.option("checkpoint", "keep_best") is not None


def best_tile(run: Run) -> Figure:
    """Return the checkpoint that checkpoint.keep_best kept."""
    label, metric = "Best checkpoint", run.option("checkpoint", "keep_best")
    if not isinstance(metric, str):
        return Figure(label, format_number(None))
    best, key = Best(metric), metric.removeprefix(PREFIX)
    for place in range(len(run.evaluations)):
        names = (key, f"{key.rpartition('/')[0]}/num_unrated", "num_unrated")
        known = {name: value for name in names if (value := run.evaluations.value(place, name)) is not None}
        best.add({"step": int(run.evaluations.steps[place]), **known})
    kept = best.checkpoint(sorted((run.path / "checkpoints").glob("step-*")))
    if kept is None or (step := step_by_name(kept)) is None:
        return Figure(label, format_number(None), "none is kept yet")
    said, better = f"{printable(metric, 60)} {format_number(best.values[step], 3)}", best.better_than(kept)
    return Figure(label, f"step {format_number(step)}", said if better is None else f"{said}; {better}")


def _last_step(run: Run) -> str:
    places, _ = run.metrics.column("ratio_new_old")
    return f"at step {format_number(float(run.metrics.steps[places[-1]]))}" if len(places) else ""


def format_reward(value: float) -> str:
    """Format a reward with three decimals."""
    return f"{value:.3f}" if abs(value) < 1e6 else format_number(value)


def format_ratio(value: float | None) -> str:
    """Format a ratio, which is near 1, with five decimals."""
    return f"{value:.5f}" if is_finite(value) and abs(value) < 1000 else format_number(value)


def format_deviation(value: float | None) -> str:
    """Format a deviation with two digits. Below 1e-6 it is only rounding, and is shown as "< 1e-6"."""
    if not is_finite(value):
        return format_number(value)
    return "< 1e-6" if 0 < value < 1e-6 else format_number(value, 2)


def format_percent(value: float | None) -> str:
    if not is_finite(value):
        return format_number(value)
    return "0 %" if value == 0 else f"{100 * value:.{2 if abs(value) < 0.1 else 1}f} %"
