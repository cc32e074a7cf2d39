"""The best of a run's evaluations by one metric, whose checkpoint is kept."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "evaluation/"  # trackers have the metrics of evaluations under such names


class Best:
    """The values of a metric of evaluations by step, and which of them is best. Without a metric none is.

    Nothing else is stored: a run that goes on reads the values from evaluation.jsonl, which is cut to the checkpoint
    that it goes on from.
    """

    def __init__(self, metric: str | None = None, lines: Iterable[Mapping[str, Any]] = ()):
        """`metric`: as checkpoint.keep_best. `lines`: of evaluation.jsonl."""
        self.metric = metric
        self._values: dict[int, float] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        value = None if self.metric is None else line.get(self.metric.removeprefix(PREFIX))
        if isinstance(value, int | float) and isinstance(step := line.get("step"), int) and step > 0:
            self._values[step] = float(value)

    def value(self, step: int) -> float | None:
        return self._values.get(step)

    def is_best(self, step: int) -> bool:
        """Return whether the evaluation after a step is better than all before it. Those of the first weights do not
        count: they are no checkpoint."""
        return step in self._values and step == self._best_of(other for other in self._values if other <= step)

    def checkpoint(self, checkpoints: Sequence[Path]) -> Path | None:
        """Return the best one of checkpoints, which are named after their steps; None if no value of them is known."""
        by_step = {int(path.name.rpartition("-")[2]): path for path in checkpoints}
        best = self._best_of(step for step in by_step if step in self._values)
        return None if best is None else by_step[best]

    def _best_of(self, steps: Iterable[int]) -> int | None:
        sign = -1 if self.metric == f"{PREFIX}loss" else 1  # a loss is best where it is least
        return max(sorted(steps), key=lambda step: sign * self._values[step], default=None)  # the first of equal ones
