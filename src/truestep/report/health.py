"""Reasons to trust a run or not, computed from its files and said in plain words."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from truestep.report.figures import (
    first_ratio,
    format_deviation,
    format_percent,
    format_ratio,
    format_reward,
    held_out_rewards,
)
from truestep.report.runs import Run, is_finite
from truestep.report.scale import format_number
from truestep.text import printable

Level = Literal["bad", "warning", "good", "note"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "good", "note")

# Sampler and trainer hold the same weights at step 1: only rounding is left between them.
LARGEST_FIRST_DEVIATION = 1e-3
# The same bound for single tokens, where the rounding of bfloat16 shows.
LARGEST_FIRST_SPREAD = 0.1
SPIKE_FACTOR = 10.0
# Beyond this share of clipped tokens most of a batch no longer teaches anything.
LARGEST_CLIPPED_FRACTION = 0.3
COLLAPSED_ENTROPY = 0.1
# From this share of the way between the smallest and the largest reward on, a task counts as solved.
SOLVED = 0.9
# A change of the reward by a smaller share of its range is not spoken of.
SMALLEST_FALL = 0.1
# Beyond this share of groups without an advantage, most of the sampling is for nothing.
LARGEST_EMPTY_SHARE = 0.5
# Below this share of distinct completions the members of a group repeat each other.
LEAST_DISTINCT_SHARE = 0.5


@dataclass(frozen=True)
class Note:
    level: Level
    text: str


def health(run: Run) -> list[Note]:
    """Collect the notes on a run, the most serious first."""
    notes = [Note("warning", problem) for problem in run.problems]
    if len(run.metrics):
        for check in (
            _ratio,
            _loss,
            _other_values,
            _gradients,
            _batch_sizes,
            _clipping,
            _reward,
            _entropy,
            _groups,
            _steps,
        ):
            notes += check(run)
    for check in (_evaluation, _ledger, _rejected):
        notes += check(run)
    return sorted(notes, key=lambda note: LEVELS.index(note.level))


def _listed(steps: Sequence[float] | np.ndarray, limit: int = 5) -> str:
    """Write `step 3`, `steps 3, 5 and 8`, or the first few with the number of the others."""
    names = [format_number(float(step)) for step in steps[:limit]]
    if len(steps) == 1:
        return f"step {names[0]}"
    if len(steps) > limit:
        return f"steps {', '.join(names)} and {len(steps) - limit:,} more"
    return f"steps {', '.join(names[:-1])} and {names[-1]}"


def _ratio(run: Run) -> Iterator[Note]:
    first = first_ratio(run)
    if first is None:
        yield Note("note", "No step logs ratio_new_old: whether sampler and trainer agree cannot be said.")
        return
    where = f"step {format_number(first.step)}"
    late = "" if first.step <= 1 else f" (the first with a ratio; updates before {where} may explain it)"
    text = f"The ratio at {where} is {format_ratio(first.ratio)}"
    spread = first.spread
    if not is_finite(first.worst):
        yield Note("bad", f"{text}, not a finite number.")
    elif first.worst > LARGEST_FIRST_DEVIATION:
        text += (
            f", off by {format_deviation(first.worst)}{late}: sampler and trainer do not give the same probabilities."
        )
        yield Note("warning" if late else "bad", text)
    elif spread is None or spread <= LARGEST_FIRST_SPREAD:
        tokens = "" if spread is None else f" (over single tokens to {format_deviation(spread)} RMS)"
        yield Note("good", f"{text}: sampler and trainer agree{tokens}.")
    if spread is not None and spread > LARGEST_FIRST_SPREAD:
        text = f"Over single tokens the ratio at {where} strays from 1 by {format_deviation(spread)} RMS{late}, "
        yield Note("warning", text + "which its mean hides: sampler and trainer differ token by token.")


def _loss(run: Run) -> Iterator[Note]:
    if not len(points := run.points("loss")):
        yield Note("note", "No step logs a loss.")
    elif len(gaps := points.gaps):
        yield Note("bad", f"The loss is NaN, infinite or null at {_listed(gaps)}.")
    else:
        yield Note("good", f"The loss is finite at all {len(points):,} steps.")


def _other_values(run: Run) -> Iterator[Note]:
    keys = sorted(set(run.metrics.names) - {"loss", "step"})
    # Only numbers can fail to be finite; null stands for NaN where a metric is a number elsewhere.
    series = ((key, run.points(key)) for key in keys)
    broken = {key: points.gaps for key, points in series if 0 < len(points.gaps) < len(points)}
    if broken:
        listed = "; ".join(f"{printable(key, 100)} at {_listed(gaps, 3)}" for key, gaps in list(broken.items())[:6])
        more = f"; and {len(broken) - 6} more metrics" if len(broken) > 6 else ""
        yield Note("warning", f"NaN, infinite or null: {listed}{more}.")


def _gradients(run: Run) -> Iterator[Note]:
    steps, norms = run.by_step("grad_norm")
    if not len(norms):
        return
    median = statistics.median(norms.tolist())
    if median == 0:
        yield Note("warning", "The median gradient norm is 0: most steps teach nothing.")
    elif len(spikes := steps[norms > SPIKE_FACTOR * median]):
        text = f"The gradient norm exceeds 10 times its median ({format_number(median)}) at {_listed(spikes)}"
        yield Note("warning", f"{text}; the largest is {format_number(float(norms.max()))}.")
    else:
        yield Note("good", f"No gradient norm exceeds 10 times the median of {format_number(median)}.")


def _batch_sizes(run: Run) -> Iterator[Note]:
    steps, sizes = run.by_step("num_documents")
    if not len(sizes):
        return
    usual, _ = Counter(sizes.tolist()).most_common(1)[0]
    configured = run.option("schedule", "docs_per_step")
    if isinstance(configured, int) and configured > 0 and run.option("schedule", "overshoot") != "keep":
        usual = float(configured)
    odd = sizes != usual
    if not odd.any():
        yield Note("good", f"Every step trained on {format_number(usual)} documents.")
        return
    ends = float(sizes[odd].min()), float(sizes[odd].max())
    found = " to ".join(dict.fromkeys(map(format_number, ends)))
    text = f"Not every step trained on {format_number(usual)} documents: {found} at {_listed(steps[odd])}."
    yield Note("warning", text)


def _clipping(run: Run) -> Iterator[Note]:
    steps, fractions = run.by_step("clipped_ratio_fraction")
    if len(high := steps[fractions > LARGEST_CLIPPED_FRACTION]):
        largest, limit = format_percent(float(fractions.max())), format_percent(LARGEST_CLIPPED_FRACTION)
        yield Note("warning", f"More than {limit} of the tokens are clipped at {_listed(high)} (largest: {largest}).")


def _reward(run: Run) -> Iterator[Note]:
    steps, rewards = run.by_step("reward")
    if len(rewards) > 1 and rewards.min() == rewards.max():
        text = (
            f"The training reward is {format_number(float(rewards[0]))} at every step: there is nothing to learn from."
        )
        yield Note("warning", text)
    elif (fall := _fall(rewards)) is not None:
        text = f"The training reward fell: its mean over {fall.window} steps was {format_number(fall.best, 3)} "
        text += (
            f"up to step {format_number(float(steps[fall.place]))}, and is {format_number(fall.last, 3)} at the end."
        )
        yield Note("warning", text)


@dataclass(frozen=True)
class Fall:
    """How far the reward is below its best: means over so many steps, and the place at which the best one ends."""

    window: int
    best: float
    place: int
    last: float


def _fall(rewards: np.ndarray) -> Fall | None:
    """Find a fall of the reward that noise does not explain."""
    window = max(5, len(rewards) // 10)
    if len(rewards) < 2 * window:
        return None
    sums = np.cumsum(np.append(0.0, rewards))
    means = (sums[window:] - sums[:-window]) / window
    best = int(means.argmax())
    last = rewards[-window:]
    with np.errstate(over="ignore"):  # rewards of any size: those whose square is none have a spread that hides all
        spread = math.sqrt((rewards[best : best + window].var(ddof=1) + last.var(ddof=1)) / window)
    drop = float(means[best] - means[-1])
    # The best of many windows is above the others by chance, by two or three times the spread.
    if best + window > len(rewards) - window or drop <= 4 * spread or drop <= SMALLEST_FALL * float(np.ptp(means)):
        return None
    return Fall(window, float(means[best]), best + window - 1, float(means[-1]))


def _entropy(run: Run) -> Iterator[Note]:
    """Judge a fall of the entropy by the reward beside it: who has solved a task need not explore it."""
    _, values = run.by_step("entropy")
    if len(values) < 2 or values[0] <= 0 or values[-1] >= COLLAPSED_ENTROPY * values[0]:
        return
    text = f"The entropy fell from {format_number(float(values[0]), 3)} to {format_number(float(values[-1]), 3)}"
    _, rewards = run.by_step("reward")
    if len(rewards) < 2:
        yield Note("warning", f"{text}: the policy has all but stopped exploring.")
        return
    part = max(1, len(rewards) // 10)
    first, last = float(rewards[:part].mean()), float(rewards[-part:].mean())
    lowest, highest = (_extreme(run, name, rewards) for name in ("min_reward", "max_reward"))
    went = f"the reward went from {format_number(first, 3)} to {format_number(last, 3)}"
    if highest > lowest and last >= lowest + SOLVED * (highest - lowest):
        ending = f"of at most {format_number(highest, 3)}: the task is all but solved, which is no collapse."
        yield Note("good", f"{text} while {went}, {ending}")
    elif last > first and _fall(rewards) is None and last - first >= SMALLEST_FALL * (highest - lowest):
        yield Note("note", f"{text} while {went}: the policy is surer, and better. It has little left to explore with.")
    else:
        yield Note(
            "warning", f"{text} while {went}: the policy has all but stopped exploring before the task was solved."
        )


def _extreme(run: Run, name: str, rewards: np.ndarray) -> float:
    """Find the smallest or the largest reward of all documents, or of the steps' means where that is not logged."""
    _, found = run.by_step(name)
    found = np.append(found, rewards)
    return float(found.min() if name.startswith("min") else found.max())


def _groups(run: Run) -> Iterator[Note]:
    """Judge the last quarter of the steps: groups that do not differ teach nothing."""
    empty, distinct = run.values("zero_advantage_groups"), run.values("distinct_completions")
    share = _late_mean(empty)
    if share is not None and share > LARGEST_EMPTY_SHARE:
        text = f"In the last steps {format_percent(share)} of the groups have no advantage and teach nothing: "
        yield Note(
            "warning", text + "the prompts are too easy or too hard (data.zero_advantage: replace samples others)."
        )
    share = _late_mean(distinct)
    if share is not None and share < LEAST_DISTINCT_SHARE:
        text = f"In the last steps {format_percent(share)} of a group's completions are distinct: "
        yield Note("warning", text + "the policy repeats itself.")


def _late_mean(values: Sequence[float]) -> float | None:
    late = [value for value in values[-max(1, len(values) // 4) :] if is_finite(value)]
    return statistics.fmean(late) if late else None


def _steps(run: Run) -> Iterator[Note]:
    steps = run.metrics.steps
    missing = float(steps[-1] - steps[0]) + 1 - len(steps)
    if missing > 0:
        yield Note("note", f"{format_number(missing)} steps between the first and the last are not logged.")
    places, seen = run.by_step("documents_seen")
    if len(back := places[1:][seen[1:] <= seen[:-1]]):
        yield Note("warning", f"documents_seen does not grow at {_listed(back)}.")


def _evaluation(run: Run) -> Iterator[Note]:
    """Judge the change of the greedy reward, or of the sampled one where there is no greedy one or that fell."""
    judged = False
    for key, name in (("greedy_reward", "greedy"), ("sampled_reward", "sampled")):
        rewards = held_out_rewards(run, key)
        if not rewards or (judged and rewards[-1] >= rewards[0] and _below_best(run, key) is None):
            continue
        if len(run.evaluations) < 2:
            yield Note("note", "There is one evaluation: no change of the held-out reward can be shown.")
            return
        if not judged or rewards[-1] < rewards[0]:
            yield _change(run, name, rewards[0], rewards[-1])
        if rewards[-1] >= rewards[0] and (note := _below_best(run, key)) is not None:
            yield note
        judged = True


def _change(run: Run, name: str, before: float, after: float) -> Note:
    """Say how a held-out reward changed from the first to the last evaluation, and whether chance explains it."""
    change = f"The held-out {name} reward went from {format_reward(before)} to {format_reward(after)}"
    prompts = run.evaluations.value(len(run.evaluations) - 1, "num_prompts")
    margin = _margin(before, after, prompts)
    noise = f"what {format_number(prompts)} prompts of reward 0 or 1 vary by chance (about {margin or 0:.2f})"
    if margin is None:
        return Note("note", f"{change}.")
    if abs(after - before) <= margin:
        return Note("note", f"{change}: within {noise}.")
    return Note("good" if after > before else "bad", f"{change}: more than {noise}.")


def _below_best(run: Run, key: str) -> Note | None:
    """Say that a held-out reward ended below its best, by more than chance explains."""
    points = run.evaluation_points(key)
    there = ~np.isnan(points.values)
    steps, rewards = points.steps[there], points.values[there]
    if len(rewards) < 3:
        return None
    best = int(rewards.argmax())
    highest, last = float(rewards[best]), float(rewards[-1])
    margin = _margin(highest, last, run.evaluations.value(len(run.evaluations) - 1, "num_prompts"))
    # The best of many evaluations is above the others by chance.
    if margin is None or highest - last <= 1.5 * margin:
        return None
    text = f"The held-out {key.partition('_')[0]} reward was best at step {format_number(float(steps[best]))}, "
    return Note("warning", text + f"with {format_reward(highest)}, and fell to {format_reward(last)}.")


def _margin(before: float, after: float, prompts: float | None) -> float | None:
    """Compute the 95 % margin of the difference of two shares of `prompts`; None where the rewards are no shares."""
    if not prompts or prompts < 1 or not (0 <= before <= 1 and 0 <= after <= 1):
        return None
    # Two successes and two failures more, so that a share of 0 or 1 has a margin too (Agresti and Coull).
    shares = [(share * prompts + 2) / (prompts + 4) for share in (before, after)]
    return 1.96 * sum(share * (1 - share) / (prompts + 4) for share in shares) ** 0.5


def _ledger(run: Run) -> Iterator[Note]:
    wrong = _disagreeing(run)
    epochs = _times_each(run)
    distinct, repeated, most, names = run.ledger.repeated(epochs)
    if repeated:
        shown = ", ".join(printable(name, 100) for name in names) + (", ..." if repeated > 3 else "")
        times = f"more than once (up to {most} times)"
        yield Note("warning", f"The ledger has {repeated:,} of {distinct:,} documents {times}: {shown}.")
    elif distinct and epochs > 1:
        yield Note("good", f"The ledger has none of its {distinct:,} documents more than {epochs} times.")
    elif distinct:
        yield Note("good", f"The ledger has each of its {distinct:,} documents once.")
    if len(wrong):
        yield Note("warning", f"Ledger and metrics disagree on the number of documents at {_listed(wrong)}.")


def _disagreeing(run: Run) -> np.ndarray:
    """List the steps whose number of documents is not the same in the metrics, as the ledger states it and lists it."""
    sizes = run.ledger.sizes
    places, counts = run.by_step("num_documents")
    logged = np.full(len(sizes), np.nan)
    _, at, among = np.intersect1d(sizes.steps, places, assume_unique=True, return_indices=True)
    logged[at] = counts[among]
    stated, listed = sizes.column("stated")[1], sizes.column("listed")[1]
    numbers = np.array([stated, logged, np.where(listed > 0, listed, np.nan)])
    # NaN, for what is not said, agrees with everything.
    return sizes.steps[np.fmin.reduce(numbers) < np.fmax.reduce(numbers)]


def _times_each(run: Run) -> int:
    """Compute how often the configuration trains on each document."""
    factors = (run.option("data", "epochs"), run.option("schedule", "updates_per_batch"))
    return math.prod(value for value in factors if isinstance(value, int) and value > 0)


def _rejected(run: Run) -> Iterator[Note]:
    total, reasons = run.rejected.total, run.rejected.counts
    if not total:
        return
    listed = "; ".join(f"{count:,} \N{MULTIPLICATION SIGN} {reason}" for reason, count in reasons.most_common(3))
    more = "; and other reasons" if len(reasons) > 3 else ""
    yield Note("note", f"{total:,} {'record was' if total == 1 else 'records were'} rejected: {listed}{more}.")
