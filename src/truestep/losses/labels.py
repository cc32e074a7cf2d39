"""The input of losses and metrics: the labels of one micro-batch, and sums over its documents.

Dimensions: T labels, D documents of the micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from truestep.types import PackedLabels, RowStatistics, per_label

# Sums a [D] vector over the ranks that have labels of the same documents. If only one rank has them, it returns the
# vector unchanged.
DocumentReducer = Callable[[torch.Tensor], torch.Tensor]


# exp(20) is 5e8. Two probabilities of the same token differ by such a ratio only through an error.
LARGEST_LOG_RATIO = 20.0


def clamped_exp(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exp of the clamped log-ratios, and which of them were clamped."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp(), log_ratio.abs() > LARGEST_LOG_RATIO


def no_reduction(sums: torch.Tensor) -> torch.Tensor:
    return sums


@dataclass(frozen=True, eq=False)
class Labels(PackedLabels):
    """Labels with the policy's statistics. Example: `labels.logprobs - labels.old_logprobs` is [T]."""

    logprobs: torch.Tensor = field(metadata=per_label())  # under the policy being trained
    entropy: torch.Tensor = field(metadata=per_label())
    logsumexp: torch.Tensor = field(metadata=per_label())
    sampler_logprobs: torch.Tensor = field(metadata=per_label())  # as recorded by the sampler
    # One over the label's denominator. This is the only place where denominators divide.
    weight: torch.Tensor = field(metadata=per_label())
    reduce_documents: DocumentReducer = no_reduction
    recomputed: bool = False  # the old log-probs are the trainer's own and not the sampler's

    @staticmethod
    def of(
        packed: PackedLabels,
        statistics: RowStatistics,
        weight: torch.Tensor,  # [T]
        reduce_documents: DocumentReducer = no_reduction,
    ) -> "Labels":
        return Labels(
            **vars(packed),
            **vars(statistics),
            sampler_logprobs=packed.old_logprobs,
            weight=weight.to(statistics.logprobs.dtype),
            reduce_documents=reduce_documents,
        )

    @property
    def log_ratio(self) -> torch.Tensor:  # [T]
        return self.logprobs - self.old_logprobs

    @property
    def log_importance(self) -> torch.Tensor:  # [T]
        """The logarithm of c, where c is the label's probability under the policy (or its recomputed old probability)
        divided by the probability under the sampler."""
        return self.old_logprobs - self.sampler_logprobs if self.recomputed else self.log_ratio

    def recompute(self) -> "Labels":
        """Replace the old log-probs by the trainer's own log-probs before the first update of these documents. These
        are the recomputed ones if they were kept, else those of this forward pass, as constants."""
        kept = self.has_label("recomputed_logprobs")
        old = torch.where(kept, self.recomputed_logprobs, self.logprobs.detach())
        has = {**self.has, "sampler_logprobs": self.has["logprobs"], "logprobs": torch.ones_like(self.has["logprobs"])}
        return replace(self, old_logprobs=old, has=has, recomputed=True)

    def has_label(self, name: str) -> torch.Tensor:  # [T] bool
        """Return for each label whether its document has an optional field."""
        return self.has[name][self.document]

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:  # [T] -> [D]
        # float64: the sum over a document of 100,000 labels must not depend on the order of the labels.
        sums = torch.zeros(len(self.num_labels), dtype=torch.float64, device=values.device)
        return self.reduce_documents(sums.index_add_(0, self.document, values.double()))

    def document_means(self, values: torch.Tensor) -> torch.Tensor:  # [T] -> [T], each label its document's mean
        means = self.document_sums(values) / self.num_labels.clamp(min=1)
        return means.to(values.dtype)[self.document]
