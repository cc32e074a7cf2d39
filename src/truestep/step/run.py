"""One plan through the model: sums over micro-batches, one gradient, and the update.

Dimensions: S tokens of the micro-batch, T its labels, D its documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from truestep.head import chunked
from truestep.head.chunked import HeadRows, SharedDocuments
from truestep.losses.labels import Labels
from truestep.losses.measure import DocumentFacts, measure
from truestep.losses.objective import Objective
from truestep.metrics.types import Metric, Sum, merge, on_host, values
from truestep.policy.policy import Policy
from truestep.policy.weights.protocol import Weights
from truestep.ranks.axes import WEIGHT_PARTS
from truestep.ranks.group import Ranks
from truestep.rollouts.packing import pack
from truestep.step.dealing import Deal, Dealt
from truestep.step.passes import Passes
from truestep.types import Coefficients, DocumentScore, PackedBatch, RowStatistics, StepPlan

_COUNTS = ("num_documents", "num_labels", "num_tokens", "num_micro_batches")


@dataclass(frozen=True)
class Accumulated:
    """What a plan's micro-batches added up to. The gradient itself is in the policy's float32 buffers."""

    metrics: dict[str, Metric]
    scores: tuple[DocumentScore, ...]  # in the plan's order

    def line(self) -> dict[str, Any]:
        """The metrics as they are logged: counts are whole numbers."""
        line: dict[str, Any] = values(self.metrics)
        return line | {name: int(line[name]) for name in _COUNTS}


@dataclass(frozen=True)
class _Mine:
    """What this rank's micro-batches added up to."""

    metrics: dict[str, Metric]
    scores: dict[int, DocumentScore]  # by place in the plan


@dataclass(frozen=True)
class StepRunner:
    policy: Policy
    objective: Objective
    metrics_level: str = "basic"
    pad_to_multiple: int = 1
    breadth_first: int = 1  # micro-batches that share a gathering of the weights
    keep_scores: bool = False

    @property
    def _ranks(self) -> Ranks:
        return self.policy.weights.ranks

    @property
    def _measures(self) -> bool:
        """Of the ranks that compute a micro-batch together, those of the last stage know what became of its labels, and
        one of them says so for all."""
        ranks, pipeline = self._ranks, self.policy.pipeline
        return ranks.stage == pipeline.rank_of(pipeline.last) and ranks.first_of_stage

    @property
    def _multiple(self) -> int:
        """Of which a micro-batch's tokens are a number, so that ranks that share them have as many each."""
        return math.lcm(self.pad_to_multiple, self._ranks.token_share)

    def accumulate(
        self,
        plan: StepPlan,
        *,
        backward: bool = True,
        beside: Mapping[str, Metric] | None = None,
    ) -> Accumulated:
        """The plan's metrics over all ranks, and with `backward` its whole gradient. `beside`: this rank's own metrics,
        to be reduced with the rest. Every rank that computes holds a part of the weights, so all run every pass."""
        mine, counts, passes = self._accumulate(plan, backward)
        parts = self._ranks.gather((on_host(mine.metrics | dict(beside or {})), mine.scores))
        passes.settle()
        metrics: dict[str, Metric] = dict(counts)
        for part, _ in parts:
            metrics = merge(metrics, part)
        scores = {index: score for _, part in parts for index, score in part.items()}
        return Accumulated(metrics, tuple(scores[index] for index in sorted(scores)))

    def _accumulate(self, plan: StepPlan, backward: bool) -> tuple[_Mine, dict[str, Metric], Passes]:
        totals, weights = plan.totals, self.policy.weights
        if plan.ranks != self._ranks.data:
            raise ValueError(f"a plan for {plan.ranks} ranks on {self._ranks.data}")
        counts: dict[str, Metric] = {
            "loss": Sum(0.0),
            "num_documents": Sum(float(totals.num_documents)),
            "num_labels": Sum(float(totals.num_labels)),
            "num_tokens": Sum(float(totals.num_tokens)),
            "num_micro_batches": Sum(float(len(plan.micro_batches) // plan.ranks)),
        }
        mine = _Mine({}, {})
        if backward:
            weights.zero_gradients()
        micro_batches = plan.of_rank(self._ranks.data_rank)
        # Where no rank has a label there is nothing to predict and nothing to differentiate.
        computed = [number for number in range(len(micro_batches)) if _any_label(plan, plan.at_once(number))]

        def dealt(number: int) -> Dealt:
            packed = pack(plan, micro_batches[number], self._multiple)
            return Dealt(packed.to(self.policy.device), Deal.of(packed, self.policy.context))

        def head(one: Dealt, rows: torch.Tensor) -> torch.Tensor | None:
            statistics, gradient = self._head(one, plan, rows, backward)
            if self._measures:
                self._measure(mine, one.batch, plan, statistics)
            return gradient

        passes = Passes(
            self.policy,
            len(computed),
            lambda number: dealt(computed[number]),
            head,
            backward=backward,
            group=self.breadth_first,
        )
        passes.run()
        if self._measures:
            for number, members in enumerate(micro_batches):
                if members and number not in computed:
                    self._measure(mine, dealt(number).batch, plan, self._nothing())
        if backward:
            weights.reduce()
        return mine, counts, passes

    def _measure(self, mine: _Mine, batch: PackedBatch, plan: StepPlan, statistics: RowStatistics) -> None:
        """Add a micro-batch's metrics, and scores where they are kept."""
        labels = self._labels(batch, plan, slice(None), statistics)
        facts = _document_facts(batch, plan)
        mine.metrics.update(merge(mine.metrics, measure(labels, self.objective, facts, self.metrics_level)))
        if self.keep_scores:
            mine.scores.update(_scores(batch, plan, statistics))

    def _nothing(self) -> RowStatistics:
        nothing = torch.zeros(0, device=self.policy.device)
        return RowStatistics(nothing, nothing, nothing)

    def _head(
        self, one: Dealt, plan: StepPlan, rows: torch.Tensor, backward: bool
    ) -> tuple[RowStatistics, torch.Tensor | None]:
        """The statistics of all the micro-batch's labels, and the gradient of the hidden states that predict this
        rank's, [T, H]."""
        with self.policy.weights.head(self.policy.model) as (weight, weight_gradient):
            statistics, gradient = self._loss(one, plan, rows.detach(), weight, weight_gradient, backward)
        return one.deal.gather(statistics), gradient

    @torch.no_grad()
    def _loss(
        self,
        one: Dealt,
        plan: StepPlan,
        rows: torch.Tensor,
        weight: torch.Tensor,
        weight_gradient: torch.Tensor | None,
        backward: bool,
    ) -> tuple[RowStatistics, torch.Tensor | None]:
        batch, deal = one.batch, one.deal
        mine, shard = deal.mine, self.policy.vocabulary_shard
        head = HeadRows(rows, weight, batch.label_ids[mine], batch.temperature[mine], self.policy.head, shard)
        if not backward:
            return chunked.forward(head), None

        def loss(chunk: slice, statistics: RowStatistics) -> Coefficients:
            among_all = slice(mine.start + chunk.start, mine.start + chunk.stop)
            return self.objective.coefficients(self._labels(batch, plan, among_all, statistics), plan.totals)

        def of_shared(rows: torch.Tensor, statistics: RowStatistics) -> Coefficients:
            assert deal.context is not None
            labels = self._labels(batch, plan, mine.start + rows, statistics)
            return self.objective.coefficients(replace(labels, reduce_documents=deal.context.sum), plan.totals)

        pieces = deal.pieces(_label_counts(batch, plan)) if self.objective.whole_documents else None
        result = chunked.forward_backward(
            head,
            loss,
            weight_gradient=weight_gradient,
            document_labels=None if pieces is None else pieces.whole,
            shared=SharedDocuments(pieces.lead, pieces.tail, of_shared) if pieces and deal.context else None,
        )
        return result.statistics, result.hidden_gradient

    def _labels(
        self, batch: PackedBatch, plan: StepPlan, chunk: slice | torch.Tensor, statistics: RowStatistics
    ) -> Labels:
        document = batch.label_document[chunk]
        weight = self.objective.denominator.label_weights(batch.num_labels[document], plan.totals)
        return Labels(
            logprobs=statistics.logprobs,
            entropy=statistics.entropy,
            logsumexp=statistics.logsumexp,
            old_logprobs=batch.old_logprobs[chunk],
            advantages=batch.advantages[chunk],
            document=document,
            weight=weight.to(statistics.logprobs.dtype),
            num_labels=batch.num_labels,
        )


def _label_counts(batch: PackedBatch, plan: StepPlan) -> list[int]:
    return [plan.documents[index].num_labels for index in batch.plan_index]


def _document_facts(batch: PackedBatch, plan: StepPlan) -> DocumentFacts:
    return DocumentFacts(
        reward=batch.reward,
        model_version=batch.model_version,
        documents_seen=plan.documents_seen,
        has_logprobs=batch.has_logprobs,
        has_advantages=batch.has_advantages,
        has_version=batch.has_version,
        has_reward=batch.has_reward,
    )


def _scores(batch: PackedBatch, plan: StepPlan, statistics: RowStatistics) -> dict[int, DocumentScore]:
    counts = batch.num_labels.tolist()
    logprobs = statistics.logprobs.cpu().split(counts)
    entropy = statistics.entropy.cpu().split(counts)
    return {
        index: DocumentScore(plan.documents[index].id, logprobs[at].numpy(), entropy[at].numpy())
        for at, index in enumerate(batch.plan_index.tolist())
    }


def _any_label(plan: StepPlan, micro_batches: Sequence[Sequence[int]]) -> bool:
    return any(plan.documents[index].num_labels for members in micro_batches for index in members)


@torch.no_grad()
def gradient_norm(weights: Weights) -> float:
    """Over all gradients, every weight once, after `gradient_divisor` and before clipping."""
    ranks = weights.ranks
    # In float64: a float32 sum of the squares of a large tensor, one after another as a CPU adds, is off by percents.
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.float64)
        for name, gradient in weights.gradients.items()
        if weights.pieces[name].counted_on(ranks)
    ]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=weights.device)
    for group in WEIGHT_PARTS:
        ranks.sum_over(group, total)
    return float(total.sqrt())


@torch.no_grad()
def clip_gradients(gradients: dict[str, torch.Tensor], norm: float, threshold: float | None) -> None:
    if threshold is not None and norm > threshold:
        for gradient in gradients.values():
            gradient.mul_(threshold / norm)
