"""What a loss is given: per-label vectors of one micro-batch, and how to sum over its documents.

Dimensions: T labels, D documents of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

# Sums a [D] vector over the ranks that hold other labels of the same documents; on one rank, the identity.
DocumentReducer = Callable[[torch.Tensor], torch.Tensor]


def no_reduction(sums: torch.Tensor) -> torch.Tensor:
    return sums


@dataclass(frozen=True)
class Labels:
    logprobs: torch.Tensor  # [T] of the policy being trained
    entropy: torch.Tensor  # [T]
    logsumexp: torch.Tensor  # [T]
    old_logprobs: torch.Tensor  # [T]
    advantages: torch.Tensor  # [T]
    document: torch.Tensor  # [T] index into D
    weight: torch.Tensor  # [T] one over the step's denominator: the only place where anything is divided
    num_labels: torch.Tensor  # [D] over the whole document
    reduce_documents: DocumentReducer = no_reduction

    def __getitem__(self, rows: slice) -> Labels:
        cut = {name: getattr(self, name)[rows] for name in _PER_LABEL}
        return replace(self, **cut)

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:  # [T] -> [D]
        # float64: a document of 100,000 labels must not lose digits to the order in which they were added.
        sums = torch.zeros(len(self.num_labels), dtype=torch.float64, device=values.device)
        return self.reduce_documents(sums.index_add_(0, self.document, values.double()))

    def document_means(self, values: torch.Tensor) -> torch.Tensor:  # [T] -> [T], each label its document's mean
        means = self.document_sums(values) / self.num_labels.clamp(min=1)
        return means.to(values.dtype)[self.document]


_PER_LABEL = ("logprobs", "entropy", "logsumexp", "old_logprobs", "advantages", "document", "weight")
