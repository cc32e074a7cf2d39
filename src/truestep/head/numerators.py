"""The softmax numerators: output of `product`, input of `numerator_kernels`.

Dimensions: C rows of a chunk, V vocabulary, N parts of the vocabulary.
"""

from dataclasses import dataclass

import torch

PART = 256  # columns of the vocabulary that share a shift
# The largest y without a shift. A numerator of 2^40, and a sum of such numerators over the vocabulary, are far below
# the float32 maximum.
SLACK = 40.0


@dataclass(frozen=True)
class Numerators:
    """The softmax numerators of each row: 2^y with y = z · log2 e - reference - shift. Each part of `PART` columns of
    the vocabulary has its own shift."""

    values: torch.Tensor | None  # [C, V]; None: not kept
    shift: torch.Tensor  # [C, N] 0 unless a numerator would be too large
    total: torch.Tensor  # [C, N] Σ 2^y of the unrounded numerators
    weighted: torch.Tensor  # [C, N] Σ 2^y · y
    label: torch.Tensor  # [C] the label's z · log2 e - reference
