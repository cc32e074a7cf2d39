"""The head's passes with the softmax fused into the product (`product`): logits are never stored or read.

The product outputs the softmax numerators n = 2^(z · log2 e - base) in the weight's dtype, and partial sums for the
statistics in float32. With p = n · factor, the gradient of a row, `p · a - c · onehot(y)`, is

    n · (a · factor) - c · onehot(y)

So the numerators enter the backward products unchanged: the factor of each row is applied to hidden states or to the
product's output instead. The label's term needs no product; it is added in float32, so that the largest part of a
gradient is never rounded. Only an entropy term, `p · b · log p`, needs a pass over the numerators.

The base of a row is its label's logit. If another logit is far larger, which is rare for labels that the model itself
sampled, the row is scaled down, so that no numerator overflows.

Dimensions: C rows of a chunk, H hidden, V vocabulary, N parts of the vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from truestep.head import hopper_product as product
from truestep.head import numerator_kernels as kernels
from truestep.head.kernels import to_front_
from truestep.head.logits import HeadSettings, LogitsGradient, Rows, multiplier
from truestep.types import Coefficients, RowStatistics

_LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class NumeratorsGradient:
    """The gradient dL/d(h Wᵀ) = scale · values - c · onehot(y), and its two backward products."""

    values: torch.Tensor  # [C, V]
    scale: torch.Tensor  # [C]
    label_ids: torch.Tensor  # [C]
    c: torch.Tensor  # [C]

    def select_(self, rows: torch.Tensor) -> "NumeratorsGradient":
        values = to_front_(self.values, rows)
        return NumeratorsGradient(values, self.scale[rows], self.label_ids[rows], self.c[rows])

    def of_hidden_(self, weight: torch.Tensor, out: torch.Tensor) -> None:  # [V, H], [C, H]
        LogitsGradient(self.values).of_hidden_(weight, out)
        kernels.scale_and_subtract_label_(out, self.scale, weight, self.label_ids, self.c)

    def add_of_weight_(self, buffer: torch.Tensor, hidden: torch.Tensor) -> None:  # [V, H], [C, H]
        LogitsGradient(self.values).add_of_weight_(buffer, kernels.scaled_rows(hidden, self.scale))
        kernels.subtract_labels_(buffer, hidden, self.label_ids, self.c)


@dataclass(frozen=True)
class _Kept:
    values: torch.Tensor | None  # [C, V]
    base: torch.Tensor  # [C]


class NumeratorPasses:
    bytes_per_logit = 2

    def __init__(self, settings: HeadSettings):
        self._settings = settings

    def forward(self, rows: Rows, keep: bool) -> tuple[_Kept, RowStatistics]:
        factor = multiplier(rows.temperature, self._settings, torch.float32) * _LOG2_E
        reference = kernels.label_logits(rows.hidden, rows.weight, rows.label_ids) * factor
        parts = product.multiply(rows.hidden, rows.weight, rows.label_ids, factor, reference, keep)
        base, statistics = kernels.join_parts_(parts, reference)
        return _Kept(parts.values, base), statistics

    def gradient(
        self, kept: _Kept, statistics: RowStatistics, rows: Rows, coefficients: Coefficients
    ) -> "NumeratorsGradient":
        assert kept.values is not None
        chain = multiplier(rows.temperature, self._settings, torch.float32)
        factor = torch.exp2(kept.base - statistics.logsumexp * _LOG2_E)
        if coefficients.b is None:
            scale = coefficients.a * factor * chain
        else:
            kernels.numerators_gradient_(kept.values, chain, factor, coefficients)
            scale = torch.ones_like(chain)
        return NumeratorsGradient(kept.values, scale, rows.label_ids, coefficients.c * chain)
