"""The search for the documents that make a gradient not finite. Nothing of it runs while gradients are finite."""

import math
from collections.abc import Sequence
from dataclasses import replace

from truestep.step.clipping import gradient_norm
from truestep.step.runner import StepRunner
from truestep.types import StepPlan

MOST_NAMED = 5


def find_not_finite(runner: StepRunner, plan: StepPlan) -> list[str]:
    """Name documents whose gradient is not finite each by itself, at most `MOST_NAMED`; the weights stay as they are.

    Half of the documents at a time, so that one among many costs about two steps. Every rank takes part. Where only a
    sum of gradients is too large, no document is named.
    """
    found: list[str] = []
    waiting = [tuple(range(len(plan.documents)))]
    while waiting and len(found) < MOST_NAMED:
        some = waiting.pop(0)
        runner.accumulate(_only(plan, some))
        if math.isfinite(gradient_norm(runner.policy.weights)):
            continue
        if len(some) == 1:
            found.append(plan.documents[some[0]].id)
        else:
            waiting[:0] = [some[: len(some) // 2], some[len(some) // 2 :]]
    return found


def _only(plan: StepPlan, some: Sequence[int]) -> StepPlan:
    """Leave other documents out of a plan; its totals and the number of its micro-batches stay."""
    place = {index: number for number, index in enumerate(some)}
    micro_batches = (tuple(place[index] for index in members if index in place) for members in plan.micro_batches)
    return replace(plan, documents=tuple(plan.documents[i] for i in some), micro_batches=tuple(micro_batches))
