"""The plan of a run's memory beside what it takes on a GPU, in a line after three steps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from truestep.config.schema import Config
from truestep.plan.advice import layout_of, most_of
from truestep.plan.memory import GIB
from truestep.plan.shape import read_shape

_STEPS = 3


class PlannedBeside:
    """Says after three steps what was measured, and what was planned."""

    def __init__(self, planned: float, say: Callable[[str], None], measure: Callable[[], float] | None = None):
        self._planned, self._say, self._steps = planned, say, 0
        self._measure: Callable[[], float] = measure or torch.cuda.max_memory_allocated

    def step(self, line: Mapping[str, Any]) -> None:
        self._steps += 1
        if self._steps == _STEPS:
            peak = self._measure()
            self._say(
                f"memory after {_STEPS} steps: {peak / GIB:.1f} GiB at the peak on rank 0, {self._planned / GIB:.1f} "
                "GiB planned"
            )

    def evaluation(self, line: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def planned_beside(config: Config, ranks: int, say: Callable[[str], None]) -> PlannedBeside:
    shape = read_shape(config)
    return PlannedBeside(most_of(config, shape, layout_of(config, ranks)), say)
