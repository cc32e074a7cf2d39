"""Reasons to trust a run or not, computed from its files and said in plain words."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from truestep.report.figures import first_ratio, format_deviation, format_percent, format_ratio, held_out
from truestep.report.runs import Run, is_finite, number, step_of
from truestep.report.scale import format_number

Level = Literal["bad", "warning", "good", "note"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "good", "note")

# Sampler and trainer hold the same weights at step 1: what is left between them is rounding.
LARGEST_FIRST_DEVIATION = 1e-3
# The same over single tokens, where the rounding of bfloat16 shows.
LARGEST_FIRST_SPREAD = 0.1
SPIKE_FACTOR = 10.0
# Beyond this share of clipped tokens most of a batch no longer teaches anything.
LARGEST_CLIPPED_FRACTION = 0.3
COLLAPSED_ENTROPY = 0.1


@dataclass(frozen=True)
class Note:
    level: Level
    text: str


def health(run: Run) -> list[Note]:
    """The notes on a run, the most serious first."""
    notes = [Note("warning", problem) for problem in run.problems]
    if run.metrics:
        for check in (_ratio, _loss, _other_values, _gradients, _batch_sizes, _clipping, _reward, _entropy, _steps):
            notes += check(run)
    for check in (_evaluation, _ledger, _rejected):
        notes += check(run)
    return sorted(notes, key=lambda note: LEVELS.index(note.level))


def _listed(steps: Sequence[float], limit: int = 5) -> str:
    """`step 3`, `steps 3, 5 and 8`, or the first few with the number of the others."""
    names = [format_number(step) for step in steps]
    if len(names) == 1:
        return f"step {names[0]}"
    if len(names) > limit:
        return f"steps {', '.join(names[:limit])} and {len(names) - limit:,} more"
    return f"steps {', '.join(names[:-1])} and {names[-1]}"


def _ratio(run: Run) -> list[Note]:
    first = first_ratio(run)
    if first is None:
        return [Note("note", "No step logs ratio_new_old: whether sampler and trainer agree cannot be said.")]
    where = f"step {format_number(first.step)}"
    late = "" if first.step <= 1 else f" (the first with a ratio; updates before {where} may explain it)"
    notes = []
    if not is_finite(first.worst):
        notes.append(Note("bad", f"The ratio at {where} is {format_ratio(first.ratio)}, not a finite number."))
    elif first.worst > LARGEST_FIRST_DEVIATION:
        text = f"The ratio at {where} is {format_ratio(first.ratio)}, off by {format_deviation(first.worst)}{late}: "
        text += "sampler and trainer do not give the same probabilities."
        notes.append(Note("warning" if late else "bad", text))
    elif first.spread is None or first.spread <= LARGEST_FIRST_SPREAD:
        text = f"The ratio at {where} is {format_ratio(first.ratio)}: sampler and trainer agree"
        text += f" (over single tokens to {format_deviation(first.spread)} RMS)." if first.spread is not None else "."
        notes.append(Note("good", text))
    if first.spread is not None and first.spread > LARGEST_FIRST_SPREAD:
        text = f"Over single tokens the ratio at {where} strays from 1 by {format_deviation(first.spread)} RMS{late}, "
        text += "which its mean hides: sampler and trainer differ token by token."
        notes.append(Note("warning", text))
    return notes


def _gaps(run: Run, key: str) -> list[float]:
    return [point.step for point in run.points(key) if point.value is None]


def _loss(run: Run) -> list[Note]:
    if not (points := run.points("loss")):
        return [Note("note", "No step logs a loss.")]
    if gaps := _gaps(run, "loss"):
        return [Note("bad", f"The loss is NaN, infinite or null at {_listed(gaps)}.")]
    return [Note("good", f"The loss is finite at all {len(points):,} steps.")]


def _other_values(run: Run) -> list[Note]:
    keys = sorted({key for record in run.metrics for key in record} - {"loss", "step"})
    # Only numbers can fail to be finite; null stands for NaN where a metric is a number elsewhere.
    broken = {key: gaps for key in keys if run.values(key) and (gaps := _gaps(run, key))}
    if not broken:
        return []
    listed = "; ".join(f"{key} at {_listed(gaps, 3)}" for key, gaps in list(broken.items())[:6])
    more = f"; and {len(broken) - 6} more metrics" if len(broken) > 6 else ""
    return [Note("warning", f"NaN, infinite or null: {listed}{more}.")]


def _gradients(run: Run) -> list[Note]:
    norms = [(point.step, point.value) for point in run.points("grad_norm") if point.value is not None]
    if not norms:
        return []
    median = statistics.median(norm for _, norm in norms)
    if median == 0:
        return [Note("warning", "The median gradient norm is 0: most steps teach nothing.")]
    spikes = [step for step, norm in norms if norm > SPIKE_FACTOR * median]
    if spikes:
        largest = format_number(max(norm for _, norm in norms))
        text = f"The gradient norm exceeds 10 times its median ({format_number(median)}) at {_listed(spikes)}"
        return [Note("warning", f"{text}; the largest is {largest}.")]
    return [Note("good", f"No gradient norm exceeds 10 times the median of {format_number(median)}.")]


def _batch_sizes(run: Run) -> list[Note]:
    sizes = [(point.step, point.value) for point in run.points("num_documents") if point.value is not None]
    if not sizes:
        return []
    usual, _ = Counter(size for _, size in sizes).most_common(1)[0]
    asked = run.option("schedule", "docs_per_step")
    if isinstance(asked, int) and asked > 0 and run.option("schedule", "overshoot") != "keep":
        usual = float(asked)
    odd = [(step, size) for step, size in sizes if size != usual]
    if not odd:
        return [Note("good", f"Every step trained on {format_number(usual)} documents.")]
    span = sorted({size for _, size in odd})
    found = format_number(span[0]) if len(span) == 1 else f"{format_number(span[0])} to {format_number(span[-1])}"
    text = (
        f"Not every step trained on {format_number(usual)} documents: {found} at {_listed([step for step, _ in odd])}."
    )
    return [Note("warning", text)]


def _clipping(run: Run) -> list[Note]:
    points = [(point.step, point.value) for point in run.points("clipped_ratio_fraction") if point.value is not None]
    high = [step for step, value in points if value > LARGEST_CLIPPED_FRACTION]
    if not high:
        return []
    largest = format_percent(max(value for _, value in points))
    limit = format_percent(LARGEST_CLIPPED_FRACTION)
    return [Note("warning", f"More than {limit} of the tokens are clipped at {_listed(high)} (largest: {largest}).")]


def _reward(run: Run) -> list[Note]:
    rewards = run.values("reward")
    if len(rewards) > 1 and min(rewards) == max(rewards):
        text = f"The training reward is {format_number(rewards[0])} at every step: there is nothing to learn from."
        return [Note("warning", text)]
    return []


def _entropy(run: Run) -> list[Note]:
    values = run.values("entropy")
    if len(values) > 1 and values[0] > 0 and values[-1] < COLLAPSED_ENTROPY * values[0]:
        text = f"The entropy fell from {format_number(values[0], 3)} to {format_number(values[-1], 3)}: "
        return [Note("warning", text + "the policy has all but stopped exploring.")]
    return []


def _steps(run: Run) -> list[Note]:
    steps = [step_of(record) for record in run.metrics]
    notes = []
    missing = steps[-1] - steps[0] + 1 - len(steps)
    if missing > 0:
        notes.append(Note("note", f"{format_number(missing)} steps between the first and the last are not logged."))
    seen = [(point.step, point.value) for point in run.points("documents_seen") if point.value is not None]
    if back := [step for (_, before), (step, after) in pairwise(seen) if after <= before]:
        notes.append(Note("warning", f"documents_seen does not grow at {_listed(back)}."))
    return notes


def _evaluation(run: Run) -> list[Note]:
    for key, name in (("greedy_reward", "greedy"), ("sampled_reward", "sampled")):
        rewards = held_out(run, key)
        if rewards is None:
            continue
        if len(run.evaluations) < 2:
            return [Note("note", "There is one evaluation: no change of the held-out reward can be shown.")]
        before, after = rewards
        change = f"The held-out {name} reward went from {before:.3f} to {after:.3f}"
        prompts = number(run.evaluations[-1], "num_prompts")
        margin = _margin(before, after, prompts)
        if margin is None:
            return [Note("note", f"{change}.")]
        noise = f"what {format_number(prompts)} prompts of reward 0 or 1 vary by chance (about {margin:.2f})"
        if abs(after - before) <= margin:
            return [Note("note", f"{change}: within {noise}.")]
        return [Note("good" if after > before else "bad", f"{change}: more than {noise}.")]
    return []


def _margin(before: float, after: float, prompts: float | None) -> float | None:
    """The 95 % margin of the difference of two shares of `prompts`, None where the rewards are no shares."""
    if not prompts or prompts < 1 or not (0 <= before <= 1 and 0 <= after <= 1):
        return None
    # Two successes and two failures more, so that a share of 0 or 1 has a margin too (Agresti and Coull).
    shares = [(share * prompts + 2) / (prompts + 4) for share in (before, after)]
    return 1.96 * sum(share * (1 - share) / (prompts + 4) for share in shares) ** 0.5


def _ledger(run: Run) -> list[Note]:
    if not run.ledger:
        return []
    counts: Counter[str] = Counter()
    wrong = []
    logged = {point.step: point.value for point in run.points("num_documents") if point.value is not None}
    for record in run.ledger:
        documents = record.get("documents")
        documents = documents if isinstance(documents, list) else []
        # An identifier may be a number or a string, and is the same document either way only within its kind.
        counts.update(repr(document) for document in documents)
        step, size = number(record, "step"), number(record, "num_documents")
        sizes = {value for value in (size, logged.get(step) if step is not None else None) if value is not None}
        if documents:
            sizes.add(float(len(documents)))
        if len(sizes) > 1 and step is not None:
            wrong.append(step)
    notes = []
    passes = _times_each(run)
    twice = [document for document, count in counts.items() if count > passes]
    if not twice and passes > 1 and counts:
        notes.append(Note("good", f"The ledger has none of its {len(counts):,} documents more than {passes} times."))
    elif twice:
        shown = ", ".join(twice[:3]) + (", ..." if len(twice) > 3 else "")
        worst = max(counts.values())
        text = (
            f"The ledger has {len(twice):,} of {len(counts):,} documents more than once (up to {worst} times): {shown}."
        )
        notes.append(Note("warning", text))
    elif counts:
        notes.append(Note("good", f"The ledger has each of its {len(counts):,} documents once."))
    if wrong:
        notes.append(Note("warning", f"Ledger and metrics disagree on the number of documents at {_listed(wrong)}."))
    return notes


def _times_each(run: Run) -> int:
    """How often the configuration asks for each document."""
    asked = (run.option("data", "epochs"), run.option("schedule", "updates_per_batch"))
    return math.prod(value for value in asked if isinstance(value, int) and value > 0)


def _rejected(run: Run) -> list[Note]:
    if not run.rejected:
        return []
    reasons = Counter(str(record.get("reason", "no reason given"))[:120] for record in run.rejected).most_common(3)
    listed = "; ".join(f"{count:,} \N{MULTIPLICATION SIGN} {reason}" for reason, count in reasons)
    kinds = len({str(record.get("reason", "")) for record in run.rejected})
    more = "; and other reasons" if kinds > 3 else ""
    count = f"{len(run.rejected):,} {'record was' if len(run.rejected) == 1 else 'records were'} rejected"
    return [Note("note", f"{count}: {listed}{more}.")]
