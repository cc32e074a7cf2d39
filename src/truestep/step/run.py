"""One plan through the model: sums over micro-batches, one gradient, and the update.

Dimensions: S tokens of the micro-batch, T its labels, D its documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from truestep.head import chunked
from truestep.head.chunked import HeadRows
from truestep.losses.labels import Labels
from truestep.losses.measure import DocumentFacts, measure
from truestep.losses.objective import Objective
from truestep.metrics.types import Metric, Sum, merge, values
from truestep.policy.policy import Policy
from truestep.rollouts.packing import pack
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
class StepRunner:
    policy: Policy
    objective: Objective
    metrics_level: str = "basic"
    pad_to_multiple: int = 1

    def accumulate(self, plan: StepPlan, *, backward: bool = True, keep_scores: bool = False) -> Accumulated:
        """The plan's metrics, and with `backward` its whole gradient."""
        totals = plan.totals
        metrics: dict[str, Metric] = {
            "loss": Sum(0.0),
            "num_documents": Sum(float(totals.num_documents)),
            "num_labels": Sum(float(totals.num_labels)),
            "num_tokens": Sum(float(totals.num_tokens)),
            "num_micro_batches": Sum(float(len(plan.micro_batches))),
        }
        scores: dict[int, DocumentScore] = {}
        if backward:
            self.policy.weights.zero_gradients()
        for micro_batch in plan.micro_batches:
            if not micro_batch:
                continue
            batch = pack(plan, micro_batch, self.pad_to_multiple).to(self.policy.device)
            statistics = self._micro_batch(batch, plan, backward)
            labels = self._labels(batch, plan, slice(None), statistics)
            facts = _document_facts(batch, plan)
            metrics = merge(metrics, measure(labels, self.objective, facts, self.metrics_level))
            if keep_scores:
                scores |= _scores(batch, plan, statistics)
        return Accumulated(metrics, tuple(scores[index] for index in sorted(scores)))

    def _micro_batch(self, batch: PackedBatch, plan: StepPlan, backward: bool) -> RowStatistics:
        with torch.set_grad_enabled(backward):
            # Where no token is a label there is nothing to predict and nothing to differentiate.
            hidden = self.policy.hidden(batch) if len(batch.label_rows) else self.policy.head_weight[:0]
            rows = hidden.index_select(0, batch.label_rows)
        weight = self.policy.head_weight
        temperature = batch.temperature
        head = HeadRows(rows.detach(), weight.detach(), batch.label_ids, temperature, self.policy.head)
        if not backward or not len(batch.label_rows):
            return chunked.forward(head)

        def loss(chunk: slice, statistics: RowStatistics) -> Coefficients:
            return self.objective.coefficients(self._labels(batch, plan, chunk, statistics), plan.totals)

        result = chunked.forward_backward(
            head,
            loss,
            weight_gradient=self.policy.weights.gradient_of(weight),
            document_labels=_label_counts(batch, plan) if self.objective.whole_documents else None,
        )
        assert result.hidden_gradient is not None
        rows.backward(result.hidden_gradient.to(rows.dtype))
        return result.statistics

    def _labels(self, batch: PackedBatch, plan: StepPlan, chunk: slice, statistics: RowStatistics) -> Labels:
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


@torch.no_grad()
def gradient_norm(gradients: dict[str, torch.Tensor]) -> float:
    """Over all gradients, after `gradient_divisor` and before clipping."""
    if not gradients:
        return 0.0
    # In float64: a float32 sum of the squares of a large tensor, one after another as a CPU adds, is off by percents.
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients.values()])
    return float(torch.linalg.vector_norm(norms))


@torch.no_grad()
def clip_gradients(gradients: dict[str, torch.Tensor], norm: float, threshold: float | None) -> None:
    if threshold is not None and norm > threshold:
        for gradient in gradients.values():
            gradient.mul_(threshold / norm)
