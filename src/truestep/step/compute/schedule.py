"""The order in which each rank of a pipeline runs its stages' passes. Pure data, made before a step.

A rank first runs forward passes, as many as it takes until the first backward pass can come back to it, then one
forward and one backward pass by turns, and then the backward passes that are left. With one stage a rank that is 1F1B.
With several it is the interleaved 1F1B: as many micro-batches as there are ranks go through a rank's first stage, then
through its second, and so on, and then the next group of micro-batches.

Any number of micro-batches will do: the order is that of the next multiple of the ranks, without the micro-batches
that do not exist. No pass needs anything of another micro-batch's, so leaving those out harms none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from truestep.ranks.pipeline import Pipeline

# `docs_per_step` makes another number of micro-batches each step, and they come again and again.
_REMEMBERED = 64


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    forward: bool

    @property
    def following(self) -> "Pass":
        """The pass that takes this one's output. Its stage is outside the pipeline where there is none."""
        return Pass(self.stage + 1 if self.forward else self.stage - 1, self.micro_batch, self.forward)

    @property
    def source(self) -> int:
        """The stage that sends this pass its input, or its gradient."""
        return self.stage - 1 if self.forward else self.stage + 1


@dataclass(frozen=True)
class Schedule:
    pipeline: Pipeline
    ranks: "tuple[tuple[Pass, ...], ...]"  # each rank's passes, in order

    def received(self, sender: int, receiver: int, forward: bool) -> "tuple[Pass, ...]":
        """List the passes of `receiver` whose input `sender` sends, in the order of sending. Whoever receives in this
        order never waits for something that is sent later than what it needs now."""
        stages = [stage for stage in range(self.pipeline.stages) if self.pipeline.rank_of(stage) == receiver]
        following = (sent.following for sent in self.ranks[sender] if sent.forward == forward)
        return tuple(receiving for receiving in following if receiving.stage in stages)


def most_alive(pipeline: Pipeline, rank: int) -> int:
    """Count the activations that a rank holds at a time, each of one micro-batch in one of its stages."""
    if pipeline.per_rank == 1:
        return pipeline.ranks - rank
    return 2 * (pipeline.ranks - rank - 1) + (pipeline.per_rank - 1) * pipeline.ranks + 1


@lru_cache(maxsize=_REMEMBERED)
def make_schedule(pipeline: Pipeline, micro_batches: int, backward: bool = True) -> Schedule:
    ranks = (tuple(_passes(pipeline, rank, micro_batches, backward)) for rank in range(pipeline.ranks))
    return Schedule(pipeline, tuple(ranks))


def _passes(pipeline: Pipeline, rank: int, micro_batches: int, backward: bool) -> "Iterator[Pass]":
    forward = list(_in_order(pipeline, rank, micro_batches, True))
    back = list(_in_order(pipeline, rank, micro_batches, False)) if backward else []
    ahead = min(most_alive(pipeline, rank) - 1, len(forward)) if backward else len(forward)
    order = forward[:ahead]
    for pair in zip(forward[ahead:], back, strict=False):
        order += pair
    order += back[len(forward) - ahead :]
    return (item for item in order if item.micro_batch < micro_batches)


def _in_order(pipeline: Pipeline, rank: int, micro_batches: int, forward: bool) -> "Iterator[Pass]":
    """Order a rank's passes of one direction. The last group has as many micro-batches as the others."""
    stages = pipeline.stages_of(rank)
    for first in range(0, micro_batches, pipeline.ranks):
        for stage in stages if forward else reversed(stages):
            for micro_batch in range(first, first + pipeline.ranks):
                yield Pass(stage, micro_batch, forward)
