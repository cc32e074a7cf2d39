"""In which order each rank of a pipeline runs its stages' forward and backward passes. Pure data, made before a step.

A rank first runs forward passes, as many as it takes until the first backward pass can come back to it, then one
forward and one backward pass by turns, and then the backward passes that are left. With one stage a rank that is 1F1B.
With several it is the interleaved 1F1B: as many micro-batches as there are ranks go through a rank's first stage, then
through its second, and so on, before the next so many.

Any number of micro-batches will do: the order is that of the next multiple of the ranks, without those that are not
there. To leave some out of an order that can be run takes nothing away that the others need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from truestep.ranks.pipeline import Pipeline

# `docs_per_step` makes another number of micro-batches each step, and they come again and again.
_REMEMBERED = 64


@dataclass(frozen=True)
class Pass:
    """Of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    forward: bool

    @property
    def following(self) -> Pass:
        """The one that takes what this one gives; outside the pipeline, nobody does."""
        return Pass(self.stage + 1 if self.forward else self.stage - 1, self.micro_batch, self.forward)

    @property
    def source(self) -> int:
        """The stage that gives it its input, or its gradient."""
        return self.stage - 1 if self.forward else self.stage + 1


@dataclass(frozen=True)
class Schedule:
    pipeline: Pipeline
    ranks: tuple[tuple[Pass, ...], ...]  # each rank's passes, in order

    def takes(self, sender: int, receiver: int, forward: bool) -> tuple[Pass, ...]:
        """The passes of `receiver` that take what `sender` sends it, in the order in which it is sent. Received in
        this order, nothing is ever waited for that is sent later than what is needed now."""
        stages = range(self.pipeline.stages)
        following = (made.following for made in self.ranks[sender] if made.forward == forward)
        return tuple(
            taken for taken in following if taken.stage in stages and self.pipeline.rank_of(taken.stage) == receiver
        )


def most_alive(pipeline: Pipeline, rank: int) -> int:
    """Activations that a rank holds at a time: of one micro-batch and one of its stages each."""
    if pipeline.per_rank == 1:
        return pipeline.ranks - rank
    return 2 * (pipeline.ranks - rank - 1) + (pipeline.per_rank - 1) * pipeline.ranks + 1


@lru_cache(maxsize=_REMEMBERED)
def make_schedule(pipeline: Pipeline, micro_batches: int, backward: bool = True) -> Schedule:
    return Schedule(
        pipeline, tuple(tuple(_passes(pipeline, rank, micro_batches, backward)) for rank in range(pipeline.ranks))
    )


def _passes(pipeline: Pipeline, rank: int, micro_batches: int, backward: bool) -> Iterator[Pass]:
    forward = list(_in_order(pipeline, rank, micro_batches, True))
    back = list(_in_order(pipeline, rank, micro_batches, False)) if backward else []
    ahead = min(most_alive(pipeline, rank) - 1, len(forward)) if backward else len(forward)
    order = forward[:ahead]
    for number, made in enumerate(forward[ahead:]):
        order += [made, back[number]]
    order += back[len(forward) - ahead :]
    return (made for made in order if made.micro_batch < micro_batches)


def _in_order(pipeline: Pipeline, rank: int, micro_batches: int, forward: bool) -> Iterator[Pass]:
    """Of one direction; the last group is whole."""
    stages = pipeline.stages_of(rank)
    for first in range(0, micro_batches, pipeline.ranks):
        for stage in stages if forward else reversed(stages):
            for micro_batch in range(first, first + pipeline.ranks):
                yield Pass(stage, micro_batch, forward)
