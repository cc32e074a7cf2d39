"""The numbers of a run that matter, as its tiles or its row of the comparison."""

import math
import statistics
from dataclasses import dataclass

from truestep.report.runs import Record, Run, is_finite, number, step_of
from truestep.report.scale import format_compact, format_duration, format_number

ARROW = "\N{RIGHTWARDS ARROW}"
RATIO_KEYS = ("ratio_new_old", "min_ratio_new_old", "max_ratio_new_old")


@dataclass(frozen=True)
class Figure:
    """A number with its name, and a word on where it comes from."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class FirstRatio:
    """How far new and old probabilities are apart where no update has come between: at the first step."""

    step: float
    ratio: float
    # The worst deviation from 1 among the ratios the step logs.
    worst: float
    # The root mean square over tokens of ratio - 1. The mean ratio alone proves little: its expectation is 1
    # for tokens sampled from the old policy, however far the two policies are apart.
    spread: float | None


def first_ratio(run: Run) -> FirstRatio | None:
    """The ratio at step 1, else at the first step that has one (NaN where that is what was logged)."""
    for record in run.metrics:
        if "ratio_new_old" in record:
            values = [number(record, key) for key in RATIO_KEYS if key in record]
            ratios = [math.nan if value is None else value for value in values]
            deviations = [abs(value - 1) for value in ratios]
            worst = math.nan if any(math.isnan(value) for value in deviations) else max(deviations)
            return FirstRatio(step_of(record), ratios[0], worst, _ratio_spread(record))
    return None


def _ratio_spread(record: Record) -> float | None:
    total, squares = number(record, "ratio_new_old_sum"), number(record, "ratio_new_old_squared_sum")
    count = number(record, "num_labels")
    if not (is_finite(total) and is_finite(squares) and is_finite(count)) or count <= 0:
        return None
    # The sums are over tokens if they agree with their number; under another normalization nothing can be said.
    if not 0.5 < total / count < 2:
        return None
    return math.sqrt(max(0.0, (squares - 2 * total + count) / count))


def held_out(run: Run, key: str) -> tuple[float, float] | None:
    """The reward of the first and of the last evaluation."""
    values = [point.value for point in run.evaluation_points(key) if point.value is not None]
    return (values[0], values[-1]) if values else None


def training_seconds(run: Run) -> float | None:
    values = run.values("step_time")
    return sum(values) if values else None


def facts(run: Run) -> list[Figure]:
    """The size of the run."""
    tokens, rate = run.values("num_tokens"), run.values("tokens_per_second")
    evaluation = [value for record in run.evaluations if is_finite(value := number(record, "seconds"))]
    return [
        Figure("Steps", format_number(run.steps)),
        Figure("Documents", format_number(run.documents)),
        Figure("Tokens", format_compact(sum(tokens) if tokens else None)),
        Figure("Time in steps", format_duration(training_seconds(run))),
        Figure("Time in evaluations", format_duration(sum(evaluation) if evaluation else None)),
        Figure("Median tokens/s", format_compact(statistics.median(rate) if rate else None)),
    ]


def tiles(run: Run) -> list[Figure]:
    """The numbers by which a run is judged."""
    result = [_held_out_tile(run, "greedy_reward", "Held-out reward, greedy")]
    result.append(_held_out_tile(run, "sampled_reward", "Held-out reward, sampled"))
    rewards = run.values("reward")
    recent = rewards[-10:]
    detail = f"mean of the last {len(recent)}: {format_number(statistics.fmean(recent))}" if recent else ""
    result.append(Figure("Final training reward", format_number(run.last("reward")), detail))
    first = first_ratio(run)
    result.append(
        Figure(
            f"|ratio \N{MINUS SIGN} 1| at step {format_number(first.step)}" if first else "|ratio \N{MINUS SIGN} 1|",
            format_deviation(first.worst) if first else format_number(None),
            f"over tokens (RMS): {format_deviation(first.spread)}" if first and first.spread is not None else "",
        )
    )
    result.append(Figure("Last ratio new/old", format_ratio(run.last("ratio_new_old")), _last_step(run)))
    clipped = run.values("clipped_ratio_fraction")
    result.append(
        Figure(
            "Clipped fraction, last",
            format_percent(run.last("clipped_ratio_fraction")),
            f"largest: {format_percent(max(clipped))}" if clipped else "",
        )
    )
    norms = run.values("grad_norm")
    result.append(
        Figure(
            "Gradient norm, median",
            format_number(statistics.median(norms) if norms else None, 3),
            f"largest: {format_number(max(norms), 3)}" if norms else "",
        )
    )
    result.append(
        Figure("Rejected records", format_number(len(run.rejected)), "reasons under Health" if run.rejected else "")
    )
    return result


def _held_out_tile(run: Run, key: str, label: str) -> Figure:
    rewards = held_out(run, key)
    if rewards is None:
        return Figure(label, format_number(None))
    if len([point for point in run.evaluation_points(key) if point.value is not None]) == 1:
        return Figure(label, f"{rewards[0]:.3f}", "one evaluation")
    change = f"{rewards[1] - rewards[0]:+.3f}"
    prompts = number(run.evaluations[-1], "num_prompts")
    over = f" over {format_number(prompts)} prompts" if prompts else ""
    return Figure(label, f"{rewards[0]:.3f} {ARROW} {rewards[1]:.3f}", change + over)


def _last_step(run: Run) -> str:
    step = next((number(record, "step") for record in reversed(run.metrics) if "ratio_new_old" in record), None)
    return "" if step is None else f"at step {format_number(step)}"


def format_ratio(value: float | None) -> str:
    """A ratio near one, whose digits beyond the third are the ones that matter."""
    return f"{value:.5f}" if is_finite(value) and abs(value) < 1000 else format_number(value)


def format_deviation(value: float | None) -> str:
    """A deviation, with two digits: below a millionth it is a matter of rounding."""
    if not is_finite(value):
        return format_number(value)
    return "< 1e-6" if 0 < value < 1e-6 else format_number(value, 2)


def format_percent(value: float | None) -> str:
    if not is_finite(value):
        return format_number(value)
    return "0 %" if value == 0 else f"{100 * value:.{2 if abs(value) < 0.1 else 1}f} %"
