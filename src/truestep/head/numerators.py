"""The softmax's numerators: output of the product, input of the numerator kernels.

Dimensions: C rows of a chunk, V vocabulary, N parts of the vocabulary.
"""

from dataclasses import dataclass

import torch

PART = 256  # columns of the vocabulary with a shift of their own
# The largest y without a shift: numerators of 2^40 and sums of as many as there are tokens are far from overflowing.
SLACK = 40.0


@dataclass(frozen=True)
class Numerators:
    """The numerators of each row's softmax: 2^y with y = z · log2 e - reference - shift. Each part of `PART` columns of
    the vocabulary has a shift of its own."""

    values: torch.Tensor | None  # [C, V]
    shift: torch.Tensor  # [C, N] 0 unless a numerator would be too large
    total: torch.Tensor  # [C, N] Σ 2^y, before it is rounded to the type of the values
    weighted: torch.Tensor  # [C, N] Σ 2^y · y
    label: torch.Tensor  # [C] z · log2 e - reference of the label
