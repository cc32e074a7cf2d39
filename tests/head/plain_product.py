"""What the head's product gives, by plain torch in float64: a stand-in where there is no Hopper GPU, and its oracle."""

from __future__ import annotations

import pytest
import torch

from truestep.head import passes
from truestep.head.numerators import SLACK, Numerators

PART = 16  # a power of two; small, so that a tiny vocabulary has several


def multiply(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    label_ids: torch.Tensor,
    factor: torch.Tensor,
    reference: torch.Tensor,
    keep: bool,
    part: int = PART,
) -> Numerators:
    y = torch.einsum("ch,vh->cv", hidden.double(), weight.double()) * factor.double()[:, None]
    y = y - reference.double()[:, None]
    label = y[torch.arange(len(y), device=y.device), label_ids]
    values, shift, total, weighted = torch.zeros_like(y), [], [], []
    for start in range(0, y.shape[1], part):
        mine = y[:, start : start + part]
        shift.append((mine.amax(1) - SLACK).clamp(min=0))
        mine = mine - shift[-1][:, None]
        numerators = torch.pow(2.0, mine)
        values[:, start : start + part] = numerators
        total.append(numerators.sum(1))
        weighted.append((numerators * mine).sum(1))
    shift, total, weighted = (torch.stack(part, 1).float() for part in (shift, total, weighted))
    return Numerators(values.to(hidden.dtype) if keep else None, shift, total, weighted, label.float())


def serve(patch: pytest.MonkeyPatch) -> None:
    """The head's numerators, made by this product, for whatever comes: of a CPU in float32, so that they are exact."""
    from truestep.head import numerator_kernels as kernels
    from truestep.head import numerator_passes

    patch.setattr(numerator_passes.product, "multiply", multiply)
    patch.setattr(kernels, "PART", PART)
    patch.setattr(passes, "_fits_the_product", lambda *_: True)
    patch.setattr(passes, "_product_serves", lambda _: True)
