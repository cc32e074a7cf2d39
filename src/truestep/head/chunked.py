"""The head, a chunk of rows at a time: logits are never held whole, and nothing depends on where chunks end.

    hidden rows ──GEMM──> logits chunk ──statistics──> loss ──> coefficients ──in place──> dL/dlogits
                                                     d hidden <──GEMM──┴──GEMM──> d weight

Three matrix products, the least that exists. A loss of whole documents whose labels lie in several chunks first
makes one pass for the statistics: a fourth.

Dimensions: T labels, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from truestep.head.logits import (
    HeadSettings,
    add_weight_gradient_,
    hidden_gradient,
    logits_gradient_,
    row_statistics,
    scaled_logits,
    wide,
)
from truestep.types import Coefficients, RowStatistics

# Statistics of some rows, and which rows they are, to the coefficients of the gradient.
LossFunction = Callable[[slice, RowStatistics], Coefficients]


@dataclass(frozen=True)
class HeadRows:
    """The rows that predict labels. Prompt, masked and padding tokens never enter the head."""

    hidden: torch.Tensor  # [T, H]
    weight: torch.Tensor  # [V, H]
    label_ids: torch.Tensor  # [T]
    temperature: torch.Tensor  # [T]
    settings: HeadSettings

    def chunks(self) -> Iterator[slice]:
        size = self.settings.rows_per_chunk(self.weight.shape[0], self.hidden.device)
        return (slice(start, min(start + size, len(self.label_ids))) for start in range(0, len(self.label_ids), size))

    def logits(self, rows: slice) -> torch.Tensor:
        return scaled_logits(self.hidden[rows], self.weight, self.temperature[rows], self.settings)


@dataclass(frozen=True)
class HeadResult:
    statistics: RowStatistics  # [T]
    hidden_gradient: torch.Tensor | None  # [T, H] float32; None without a backward pass


def forward(head: HeadRows) -> RowStatistics:
    return _join([row_statistics(head.logits(rows), head.label_ids[rows]) for rows in head.chunks()], head)


def forward_backward(
    head: HeadRows, loss: LossFunction, *, whole_documents: bool, weight_gradient: torch.Tensor | None
) -> HeadResult:
    """Both gradients of `loss`: of the hidden rows, returned, and of the weight, added into `weight_gradient` (None for
    a frozen head: it is then not computed)."""
    chunks = list(head.chunks())
    gradient = torch.empty_like(head.hidden, dtype=wide(head.hidden.dtype))
    everything = slice(0, len(head.label_ids))
    # Coefficients that need labels of other chunks are made before the pass that uses them.
    ready = loss(everything, forward(head)) if whole_documents and len(chunks) > 1 else None
    seen = []
    for rows in chunks:
        z = head.logits(rows)
        statistics = row_statistics(z, head.label_ids[rows])
        seen.append(statistics)
        coefficients = loss(rows, statistics) if ready is None else ready[rows]
        temperature = head.temperature[rows]
        logits_gradient_(z, statistics.logsumexp, head.label_ids[rows], temperature, coefficients, head.settings)
        gradient[rows] = hidden_gradient(z, head.weight)
        if weight_gradient is not None:
            add_weight_gradient_(weight_gradient, z, head.hidden[rows])
    return HeadResult(_join(seen, head), gradient)


def _join(parts: list[RowStatistics], head: HeadRows) -> RowStatistics:
    if not parts:
        nothing = head.hidden.new_empty(0, dtype=wide(head.hidden.dtype))
        return RowStatistics(nothing, nothing, nothing)
    return RowStatistics(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.entropy for part in parts]),
        torch.cat([part.logsumexp for part in parts]),
    )
