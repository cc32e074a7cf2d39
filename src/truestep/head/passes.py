"""The two passes over a chunk of logits, between the matrix products: fused kernels where they run, torch elsewhere.

Both give the same numbers; which one serves is a matter of speed. What `statistics` leaves in the logits' memory is for
`gradient` alone.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol

import torch

from truestep.head.logits import (
    HeadSettings,
    LogitsGradient,
    logits_gradient_,
    multiplier,
    round_gradient,
    row_statistics,
    scale_,
    wide,
)
from truestep.types import Coefficients, RowStatistics


class Passes(Protocol):
    def statistics(
        self, raw: torch.Tensor, label_ids: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, RowStatistics]:
        """What `gradient` needs, and the statistics of each row."""
        ...

    def gradient(
        self,
        kept: torch.Tensor,
        statistics: RowStatistics,
        label_ids: torch.Tensor,
        temperature: torch.Tensor,
        coefficients: Coefficients,
        dtype: torch.dtype,
    ) -> LogitsGradient: ...


class TorchPasses:
    def __init__(self, settings: HeadSettings):
        self._settings = settings

    def statistics(
        self, raw: torch.Tensor, label_ids: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, RowStatistics]:
        z = scale_(raw, temperature, self._settings)
        return z, row_statistics(z, label_ids)

    def gradient(
        self,
        kept: torch.Tensor,
        statistics: RowStatistics,
        label_ids: torch.Tensor,
        temperature: torch.Tensor,
        coefficients: Coefficients,
        dtype: torch.dtype,
    ) -> LogitsGradient:
        gradient = logits_gradient_(kept, statistics.logsumexp, label_ids, temperature, coefficients, self._settings)
        return round_gradient(gradient, dtype, self._settings.split_gradient)


class FusedPasses:
    def __init__(self, settings: HeadSettings):
        self._settings = settings

    def statistics(
        self, raw: torch.Tensor, label_ids: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, RowStatistics]:
        from truestep.head import kernels

        # On a CPU, under the interpreter, the backward products are float32's: see `logits`.
        raw = raw if raw.is_cuda else raw.to(wide(raw.dtype))
        factor = multiplier(temperature, self._settings, torch.float32)
        return raw, kernels.row_statistics(raw, label_ids, factor, self._settings.softcap)

    def gradient(
        self,
        kept: torch.Tensor,
        statistics: RowStatistics,
        label_ids: torch.Tensor,
        temperature: torch.Tensor,
        coefficients: Coefficients,
        dtype: torch.dtype,
    ) -> LogitsGradient:
        from truestep.head import kernels

        target = dtype if kept.is_cuda else kept.dtype
        split = self._settings.split_gradient and target != wide(target)
        low = torch.empty_like(kept, dtype=target) if split else None
        high = kernels.logits_gradient_(
            kept,
            statistics.logsumexp,
            label_ids,
            multiplier(temperature, self._settings, torch.float32),
            coefficients,
            self._settings.softcap,
            target,
            low,
        )
        return LogitsGradient(high, low)


def passes_for(settings: HeadSettings, logits: torch.Tensor) -> Passes:
    if settings.kernels and logits.dtype != torch.float64 and _kernels_run(logits.device.type):
        return FusedPasses(settings)
    return TorchPasses(settings)


@cache
def _kernels_run(device_type: str) -> bool:
    """Triton is there, and so is a GPU or its interpreter."""
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
