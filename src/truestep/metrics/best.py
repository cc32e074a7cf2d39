"""The best of a run's evaluations by one metric, whose checkpoint is kept."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "evaluation/"  # trackers have the metrics of evaluations under such names
_CHECKPOINT = re.compile(r"step-(\d+)")


def step_by_name(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint by its directory's name; None if the name is not that of a checkpoint."""
    named = _CHECKPOINT.fullmatch(checkpoint.name)
    return None if named is None else int(named[1])


class Best:
    """The values of a metric of evaluations by step, and which of them is best. Without a metric none is.

    Nothing else is stored: a run that goes on reads the values from evaluation.jsonl, which is cut to the checkpoint
    that it goes on from.
    """

    def __init__(self, metric: str | None = None, lines: Iterable[Mapping[str, Any]] = ()):
        """`metric`: as checkpoint.keep_best. `lines`: of evaluation.jsonl."""
        self.metric = metric
        self.values: dict[int, float] = {}  # by step; 0 is the evaluation before the first step
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take note of an evaluation: of its value if it is a finite number, and all of its completions are rated."""
        if self.metric is None:
            return
        key = self.metric.removeprefix(PREFIX)
        value, step = line.get(key), line.get("step")
        unrated = line.get(f"{key.rpartition('/')[0]}/num_unrated", line.get("num_unrated"))
        if isinstance(value, int | float) and math.isfinite(value) and isinstance(step, int) and not unrated:
            self.values[step] = float(value)

    def is_best(self, step: int, checkpoints: Sequence[Path]) -> bool:
        """Return whether the evaluation after a step is better than those after the steps of all checkpoints."""
        steps = [other for path in checkpoints if (other := step_by_name(path)) is not None and other < step]
        return step in self.values and step == self._best_of([*steps, step])

    def checkpoint(self, checkpoints: Sequence[Path]) -> Path | None:
        """Return the best one of checkpoints, which are named after their steps; None if no value of them is known."""
        by_step = {step: path for path in checkpoints if (step := step_by_name(path)) is not None}
        best = self._best_of(by_step)
        return None if best is None else by_step[best]

    def better_than(self, checkpoint: Path) -> str | None:
        """Return a sentence on the best evaluation if it is better than that of a checkpoint, the best that is kept."""
        step, best = step_by_name(checkpoint), self._best_of(self.values)
        if best is None or step not in self.values or self.values[best] == self.values[step]:
            return None
        where = "of the first weights" if best == 0 else f"after step {best}, which has no checkpoint,"
        return f"the evaluation {where} was better: {self.values[best]:.3g}"

    def _best_of(self, steps: Iterable[int]) -> int | None:
        sign = -1 if self.metric == f"{PREFIX}loss" else 1  # a loss is best where it is least
        known = sorted(step for step in steps if step in self.values)
        return max(known, key=lambda step: sign * self.values[step], default=None)  # the first of equal ones
