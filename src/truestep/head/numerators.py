"""The softmax's numerators, as the product leaves them and the kernels beside it take them.

Dimensions: C rows of a chunk, V vocabulary, N parts of the vocabulary.
"""

from dataclasses import dataclass

import torch

PART = 256  # of the vocabulary, which the product makes at a time
# The largest y without a shift: numerators of 2^40 and sums of as many as there are tokens are far from overflowing.
SLACK = 40.0


@dataclass(frozen=True)
class Numerators:
    """The numerators of each row's softmax: 2^y with y = z · log2 e - reference - shift. Each part of `PART` columns of
    the vocabulary has a shift of its own."""

    values: torch.Tensor | None  # [C, V]
    shift: torch.Tensor  # [C, N] 0 but where a numerator would otherwise be too large
    total: torch.Tensor  # [C, N] Σ 2^y, before it is rounded to the type of the values
    weighted: torch.Tensor  # [C, N] Σ 2^y · y
    label: torch.Tensor  # [C] z · log2 e - reference of the label
