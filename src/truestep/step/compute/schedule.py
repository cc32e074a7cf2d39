"""The pipeline schedule: in which order each rank runs the passes of its stages. Pure data, made before a step.

A rank starts with forward passes until its first backward pass can arrive, then alternates one forward and one backward
pass, and ends with the remaining backward passes. With one stage per rank this is 1F1B. With several it is interleaved
1F1B: a group of micro-batches, one per rank, goes through the rank's first stage, then through its second, and so on;
then the next group starts.

The number of micro-batches need not be a multiple of the ranks: the schedule for the next multiple is used, and passes
of micro-batches that do not exist are left out. This is possible because no pass depends on another micro-batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from truestep.ranks.pipeline import Pipeline

# number of cached schedules: the number of micro-batches varies a little from step to step
_REMEMBERED = 64


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch through one stage."""

    stage: int
    micro_batch: int
    forward: bool

    @property
    def following(self) -> "Pass":
        """The pass that takes this pass's output. For the last pass, its stage is outside the pipeline."""
        return Pass(self.stage + 1 if self.forward else self.stage - 1, self.micro_batch, self.forward)

    @property
    def source(self) -> int:
        """The stage that sends the input of this pass: activations, or a gradient."""
        return self.stage - 1 if self.forward else self.stage + 1


@dataclass(frozen=True)
class PipelineSchedule:
    """The passes of all ranks of a pipeline, in order."""

    pipeline: Pipeline
    ranks: "tuple[tuple[Pass, ...], ...]"  # each rank's passes, in order

    def received(self, sender: int, receiver: int, forward: bool) -> "tuple[Pass, ...]":
        """List the passes of `receiver` whose input comes from `sender`, in the order of sending. Receiving in this
        order cannot deadlock."""
        stages = [stage for stage in range(self.pipeline.stages) if self.pipeline.rank_of(stage) == receiver]
        following = (sent.following for sent in self.ranks[sender] if sent.forward == forward)
        return tuple(receiving for receiving in following if receiving.stage in stages)


def most_alive(pipeline: Pipeline, rank: int) -> int:
    """Return the largest number of activations that a rank holds at a time. Each belongs to one micro-batch in one
    stage."""
    if pipeline.per_rank == 1:
        return pipeline.ranks - rank
    return 2 * (pipeline.ranks - rank - 1) + (pipeline.per_rank - 1) * pipeline.ranks + 1


@lru_cache(maxsize=_REMEMBERED)
def make_schedule(pipeline: Pipeline, micro_batches: int, backward: bool = True) -> PipelineSchedule:
    ranks = (tuple(_passes(pipeline, rank, micro_batches, backward)) for rank in range(pipeline.ranks))
    return PipelineSchedule(pipeline, tuple(ranks))


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
    """Yield a rank's forward or backward passes in order. They include passes of micro-batches that do not exist, which
    complete the last group."""
    stages = pipeline.stages_of(rank)
    for first in range(0, micro_batches, pipeline.ranks):
        for stage in stages if forward else reversed(stages):
            for micro_batch in range(first, first + pipeline.ranks):
                yield Pass(stage, micro_batch, forward)
