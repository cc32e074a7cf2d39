"""Faults that other trainers had, planted in the ranks that `verify` starts: each must be found out, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from truestep import assemble
from truestep.head import logits, passes
from truestep.losses.objective import Denominator
from truestep.metrics.types import Mean
from truestep.policy.shards import ShardedWeights
from truestep.step import run
from truestep.step.run import StepRunner
from truestep.types import PackedBatch, StepPlan, StepTotals

_LOCAL_LABELS = [0]


def _know_local_labels() -> None:
    honest = StepRunner._accumulate

    def counting(self: StepRunner, plan: StepPlan, backward: bool) -> Any:
        mine = [index for members in plan.of_rank(self._ranks.data_rank) for index in members]
        _LOCAL_LABELS[0] = sum(plan.documents[index].num_labels for index in mine)
        return honest(self, plan, backward)

    StepRunner._accumulate = counting  # type: ignore[method-assign]


def _weights_over(divide: float) -> None:
    _know_local_labels()
    honest = Denominator.label_weights

    def local(self: Denominator, num_labels: torch.Tensor, totals: StepTotals) -> torch.Tensor:
        return honest(self, num_labels, dataclasses.replace(totals, num_labels=_LOCAL_LABELS[0])) / divide

    Denominator.label_weights = local  # type: ignore[method-assign]


def per_rank_mean() -> None:
    """Each rank's mean, and the mean of those."""
    _weights_over(2.0)


def local_label_count() -> None:
    """Each rank divides by the labels that it holds itself."""
    _weights_over(1.0)


def hidden_world_division() -> None:
    """FSDP's own default: an average over the ranks."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]
    honest = FSDPModule.set_force_sum_reduction_for_comms
    FSDPModule.set_force_sum_reduction_for_comms = lambda self, enable: honest(self, True)  # type: ignore[method-assign]


def last_micro_batch_only() -> None:
    """The gradient of the others is thrown away."""
    honest, place = StepRunner._micro_batch, [0, 0]
    told = ShardedWeights.micro_batch

    def remember(self: ShardedWeights, number: int, of: int, group: int, backward: bool) -> None:
        place[:] = [number, of]
        told(self, number, of, group, backward)

    def only_last(self: StepRunner, batch: PackedBatch, plan: StepPlan, backward: bool) -> Any:
        return honest(self, batch, plan, backward and place[0] == place[1] - 1)

    ShardedWeights.micro_batch = remember  # type: ignore[method-assign]
    StepRunner._micro_batch = only_last  # type: ignore[method-assign]


def document_on_two_ranks() -> None:
    honest = StepPlan.of_rank

    def greedy(self: StepPlan, rank: int) -> tuple[tuple[int, ...], ...]:
        mine = honest(self, rank)
        return mine if rank == 0 else ((*mine[0], honest(self, 0)[0][0]), *mine[1:])

    StepPlan.of_rank = greedy  # type: ignore[method-assign]


def untied_head() -> None:
    """What happens where sharding comes after the tie was lost: the head trains a copy of the embedding."""
    honest = ShardedWeights.__init__

    def untying(self: ShardedWeights, model: Any, *arguments: Any, **options: Any) -> None:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        honest(self, model, *arguments, **options)

    ShardedWeights.__init__ = untying  # type: ignore[method-assign]


def mean_of_means() -> None:
    def merge(self: Mean, other: Mean) -> Mean:
        mine, theirs = self.value(), other.value()
        if mine is None or theirs is None:
            return self if theirs is None else other
        return Mean((mine + theirs) / 2, 1.0)

    Mean.merge = merge  # type: ignore[method-assign]


def wrong_temperature() -> None:
    def ignored(temperature: torch.Tensor, settings: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full_like(temperature, settings.scale, dtype=dtype)

    logits.multiplier = passes.multiplier = ignored


def labels_shifted_by_one() -> None:
    honest = run.pack

    def shifted(*arguments: Any) -> PackedBatch:
        batch = honest(*arguments)
        return dataclasses.replace(batch, label_rows=batch.label_rows + 1)

    run.pack = shifted


def clip_sides_swapped() -> None:
    honest = assemble.clip_bounds
    assemble.clip_bounds = lambda low, high: honest(high, low)


def ragged_ranks_hang() -> None:
    """A rank without documents runs no pass: the others wait for it, and it for them."""
    honest = StepRunner._micro_batch

    def skipping(self: StepRunner, batch: PackedBatch, plan: StepPlan, backward: bool) -> Any:
        return honest(self, batch, plan, backward) if batch.num_documents else self._nothing()

    StepRunner._micro_batch = skipping  # type: ignore[method-assign]
