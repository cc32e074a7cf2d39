"""A sink that compares a run's measured peak memory and time with the plan, in two lines after three steps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.plan.advice import layout_of, most_of
from truestep.plan.cost import Work, plan_time
from truestep.plan.memory import GIB
from truestep.plan.rates import Rates
from truestep.plan.shape import read_shape

_STEPS = 3
# The planned parts of a step; the time of sampling, rating and waiting is not planned.
_PLANNED = ("time/reference", "time/forward", "time/head", "time/backward", "time/reduce", "time/optimizer")
# (documents, tokens, labels of a step) -> seconds.
TimePlan = Callable[[float, float, float], float]


class PlannedBeside:
    """Prints the measured and the planned memory and time after three steps."""

    def __init__(
        self,
        planned: float,
        say: Callable[[str], None],
        measure: Callable[[], float] | None = None,
        seconds: TimePlan | None = None,
    ):
        self._planned, self._say, self._steps = planned, say, 0
        self._measure: Callable[[], float] = measure or torch.cuda.max_memory_allocated
        self._seconds = seconds

    def step(self, line: Mapping[str, Any]) -> None:
        self._steps += 1
        if self._steps != _STEPS:
            return
        peak = self._measure()
        self._say(
            f"memory after {_STEPS} steps: {peak / GIB:.1f} GiB at the peak on rank 0, {self._planned / GIB:.1f} "
            "GiB planned"
        )
        spent = sum(line.get(name, 0.0) for name in _PLANNED)
        if self._seconds is not None and spent:
            seconds = self._seconds(line["num_documents"], line["num_tokens"], line["num_labels"])
            self._say(f"time of step {line['step']}: {spent:.2f} s of computing, {seconds:.2f} s planned")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def planned_beside(config: Config, ranks: int, say: Callable[[str], None], rates: Rates | None) -> PlannedBeside | None:
    """Make the sink that compares a run with its plan; None if the model cannot be planned. Without rates it compares
    memory only."""
    try:
        shape, layout = read_shape(config), layout_of(config, ranks)
        planned = most_of(config, shape, layout)
    except TruestepError:
        return None

    def seconds(documents: float, tokens: float, labels: float) -> float:
        assert rates is not None
        return plan_time(config, shape, layout, rates, Work(tokens, labels, tokens / max(1.0, documents))).total

    return PlannedBeside(planned, say, seconds=None if rates is None else seconds)
