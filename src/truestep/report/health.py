"""The verdicts on a run, and notes on its files, as sentences."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from truestep.report.figures import first_ratio, format_deviation, format_ratio
from truestep.report.formats import format_number
from truestep.report.rollouts import read_rows
from truestep.report.runs import Run, finite_column, is_finite
from truestep.report.verdicts import Evidence, Level, Verdict, judge
from truestep.report.verdicts.watching import most_common
from truestep.rollouts.kept.files import FOLDER, list_files
from truestep.text import printable

LEVELS: tuple[Level, ...] = ("bad", "warning", "good", "note")

# At step 1, sampler and trainer have the same weights, so their ratio differs from 1 only by rounding.
LARGEST_FIRST_DEVIATION = 1e-3
# The bound for the root mean square over tokens. It is larger because of bfloat16 rounding.
LARGEST_FIRST_SPREAD = 0.1
SPIKE_FACTOR = 10.0


@dataclass(frozen=True)
class Note:
    level: Level
    text: str


@dataclass(frozen=True)
class Health:
    """The verdicts on a run and the notes on its files."""

    verdicts: list[Verdict]  # the first is the verdict on what the policy learns
    notes: list[Note]  # the most serious first

    @property
    def well(self) -> bool:
        """True if the policy learned and there is no warning."""
        levels = {*(verdict.level for verdict in self.verdicts), *(note.level for note in self.notes)}
        return self.verdicts[0].level == "good" and not levels & {"bad", "warning"}


def health(run: Run) -> Health:
    """Judge a run from its files."""
    verdicts = judge(evidence_of(run))
    notes = [Note("warning", problem) for problem in run.problems]
    if len(run.metrics):
        for check in (_ratio, _loss, _other_values, _batch_sizes, _steps):
            notes += check(run)
        if verdicts[0].level != "bad":  # a failing policy has gradients of any size
            notes += _gradients(run)
    notes += _ledger(run)
    if not any(verdict.kind == "rejected" for verdict in verdicts):
        notes += _rejected(run)
    return Health(verdicts, sorted(notes, key=lambda note: LEVELS.index(note.level)))


def evidence_of(run: Run) -> Evidence:
    passes, updates = run.option("evaluation", "pass_reward"), run.option("schedule", "updates_per_batch")
    # Records rejected while rollout files are read do not count here, because they are not completions of this run.
    sampled = bool(run.by_step("num_rejected")[1].any())
    return Evidence(
        run.by_step,
        lambda key: finite_column(run.evaluations, key),
        run.metrics.names,
        rejected=run.rejected.counts if sampled else {},
        pass_reward=float(passes) if isinstance(passes, int | float) else None,
        updates=updates if isinstance(updates, int) and updates > 0 else 1,
        quote=lambda: _most_common_lately(run),
    )


def _most_common_lately(run: Run) -> str | None:
    """Quote the most common completion of the last step whose rollouts were kept."""
    files = list_files(run.path / FOLDER)
    rows = read_rows(files[-1], ("step", "completion", "rejected")) if files else None
    last = max((row["step"] for row in rows or ()), default=0)
    return most_common(row["completion"] for row in rows or () if row["step"] == last and row["rejected"] is None)


def _listed(steps: Sequence[float] | np.ndarray, limit: int = 5) -> str:
    """Return `step 3`, `steps 3, 5 and 8`, or `steps 1, 2, 3, 4, 5 and 7 more`."""
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
    # A null counts as NaN if the metric is a number at another step.
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
        return
    if len(spikes := steps[norms > SPIKE_FACTOR * median]):
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


def _steps(run: Run) -> Iterator[Note]:
    steps = run.metrics.steps
    missing = float(steps[-1] - steps[0]) + 1 - len(steps)
    if missing > 0:
        yield Note("note", f"{format_number(missing)} steps between the first and the last are not logged.")
    places, seen = run.by_step("documents_seen")
    if len(back := places[1:][seen[1:] <= seen[:-1]]):
        yield Note("warning", f"documents_seen does not grow at {_listed(back)}.")


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
    """Return the steps at which the number of documents differs between three sources: the metrics, the ledger's
    num_documents, and the ledger's list of documents."""
    sizes = run.ledger.sizes
    places, counts = run.by_step("num_documents")
    logged = np.full(len(sizes), np.nan)
    _, at, among = np.intersect1d(sizes.steps, places, assume_unique=True, return_indices=True)
    logged[at] = counts[among]
    stated, listed = sizes.column("stated")[1], sizes.column("listed")[1]
    numbers = np.array([stated, logged, np.where(listed > 0, listed, np.nan)])
    # fmin and fmax ignore NaN, which stands for a missing number.
    return sizes.steps[np.fmin.reduce(numbers) < np.fmax.reduce(numbers)]


def _times_each(run: Run) -> int:
    """Return how many times the configuration trains on each document."""
    factors = (run.option("data", "epochs"), run.option("schedule", "updates_per_batch"))
    return math.prod(value for value in factors if isinstance(value, int) and value > 0)


def _rejected(run: Run) -> Iterator[Note]:
    total, reasons = run.rejected.total, run.rejected.counts
    if not total:
        return
    listed = "; ".join(f"{count:,} \N{MULTIPLICATION SIGN} {reason}" for reason, count in reasons.most_common(3))
    more = "; and other reasons" if len(reasons) > 3 else ""
    yield Note("note", f"{total:,} {'record was' if total == 1 else 'records were'} rejected: {listed}{more}.")
