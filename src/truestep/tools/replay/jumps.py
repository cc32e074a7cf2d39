"""Finds the step at which a metric of a run jumped, that is, was far from its values at the steps before."""

import difflib
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.metrics.spent import of_the_machine
from truestep.run.again import ReplayError

_AROUND = 20  # steps that a step is compared with
_LEAST_BEFORE = 4  # a step with fewer steps before it is compared with the steps after it too
FAR = 8.0  # a step has jumped if it is more than so many spreads from the median
_FLOOR = 0.005  # a spread is at least this share of the median, so that harmless noise is no jump
# Metrics of a step that cannot be attributed to single documents.
_OF_NO_DOCUMENT = frozenset(
    {
        *("step", "documents_seen", "num_documents", "num_sequences", "num_labels", "num_tokens", "learning_rate"),
        *("num_micro_batches", "computed_tokens", "recomputed_prefix_tokens", "num_rejected"),
        *("num_put_aside", "entropy_bonus_weight"),
    }
)


@dataclass(frozen=True)
class Jump:
    """A step's value of a metric, and the values of the steps around it."""

    metric: str
    step: int
    value: float
    around: Sequence[float]
    """The values of the steps before it; at a run's beginning also of those after it."""

    @property
    def usual(self) -> float | None:
        """The median of the steps around; None if there are too few."""
        return statistics.median(self.around) if len(self.around) > 1 else None

    @property
    def spreads(self) -> float:
        """The distance of the value from the median of the steps around, in units of their spread."""
        usual = self.usual
        if usual is None:
            return 0.0
        deviation = 1.4826 * statistics.median(abs(value - usual) for value in self.around)
        few = (max(self.around) - min(self.around)) / 2 if len(self.around) < 2 * _LEAST_BEFORE else 0.0
        floor = max(_FLOOR * statistics.median(map(abs, self.around)), 1e-12)
        return abs(self.value - usual) / max(deviation, few, floor)

    def unusual(self, value: float) -> float:
        """Return the distance of a value from the usual one, as a share of this step's distance."""
        usual = self.usual
        return 1.0 if usual is None or usual == self.value else abs(value - usual) / abs(self.value - usual)

    @property
    def jumped(self) -> bool:
        return not self.spreads <= FAR

    @property
    def text(self) -> str:
        if self.usual is None:
            return f"{self.metric} is {number(self.value)} at step {self.step}; there are no steps to compare it with"
        others = f"the {len(self.around)} steps around have {number(min(self.around))} to {number(max(self.around))}"
        said = "jumped" if self.jumped else "does not stand out"
        return f"{self.metric} {said} at step {self.step}: it is {number(self.value)}, and {others}"


def number(value: float) -> str:
    return f"{value:.4g}"


def values_of(run: Path, metric: str, lines: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return a metric's values by step. If there are none, raise an error that lists the run's metrics."""
    if metric in _OF_NO_DOCUMENT or of_the_machine(metric):
        raise ReplayError(f"no document contributes to {metric}: name a metric of the step's labels, or grad_norm")
    found = {
        step: float(line[metric]) for step, line in sorted(lines.items()) if isinstance(line.get(metric), int | float)
    }
    if found:
        return found
    names = sorted(
        {name for line in lines.values() for name in line if name not in _OF_NO_DOCUMENT and not of_the_machine(name)}
    )
    if not names:
        raise ReplayError(f"{run} has no metrics.jsonl with a step: logging.jsonl writes it")
    close = difflib.get_close_matches(metric, names, 3, 0.5)
    hint = f"; did you mean {', '.join(close)}?" if close else "."
    listed = textwrap.fill(", ".join(names), 78, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    raise ReplayError(f"{run} has no metric {metric}{hint} It has\n{listed}")


def jump_at(metric: str, values: Mapping[int, float], step: int) -> Jump:
    """Compare a step with the steps before it."""
    steps = sorted(values)
    before = [other for other in steps if other < step][-_AROUND:]
    if len(before) < _LEAST_BEFORE:
        after = [other for other in steps if other > step]
        before += after[: 2 * _LEAST_BEFORE - len(before)]
    return Jump(metric, step, values[step], [values[other] for other in before if math.isfinite(values[other])])


def farthest(metric: str, values: Mapping[int, float]) -> Jump:
    """Return the step that is farthest from the steps around it."""
    return max((jump_at(metric, values, step) for step in sorted(values)), key=lambda jump: jump.spreads)


def find_jump(metric: str, values: Mapping[int, float]) -> Jump | None:
    """Return the largest jump; None if no step stands out. If consecutive steps jumped, return the first of them,
    because the others may follow from it."""
    jumps = [jump for step in sorted(values) if (jump := jump_at(metric, values, step)).jumped]
    if not jumps:
        return None
    place = max(range(len(jumps)), key=lambda at: jumps[at].spreads)
    while place and jumps[place - 1].step == jumps[place].step - 1:
        place -= 1
    return jumps[place]
