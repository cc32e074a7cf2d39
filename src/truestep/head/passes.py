"""The forward and backward pass of a chunk of rows, in three versions: the Hopper product with a fused softmax, Triton
kernels, and plain torch.

They differ only in speed. What a version's `forward` keeps can be used only by its own `gradient`.
"""

import os
from functools import cache
from typing import Any, Protocol

import torch

from truestep.gpu.self_test import serves
from truestep.head.logits import (
    HeadSettings,
    LogitsGradient,
    Rows,
    logits_gradient_,
    multiplier,
    raw_logits,
    round_gradient,
    row_statistics,
    scale_,
    wide,
)
from truestep.types import Coefficients, RowStatistics


class Gradient(Protocol):
    """The gradient dL/d(h Wᵀ), and its two backward products."""

    def select_(self, rows: torch.Tensor) -> "Gradient":
        """Keep only the given rows. This is in place, since a copy would need more memory. Indices must ascend."""
        ...

    def of_hidden_(self, weight: torch.Tensor, out: torch.Tensor) -> None: ...

    def add_of_weight_(self, buffer: torch.Tensor, hidden: torch.Tensor) -> None: ...


class HeadPasses(Protocol):
    """The forward and backward pass of a chunk of rows."""

    @property
    def bytes_per_logit(self) -> int:
        """The memory per logit of a chunk between the forward and the backward pass."""
        ...

    def forward(self, rows: Rows, keep: bool) -> tuple[Any, RowStatistics]:
        """Compute the statistics of each row and, with `keep`, the input of `gradient`."""
        ...

    def gradient(self, kept: Any, statistics: RowStatistics, rows: Rows, coefficients: Coefficients) -> "Gradient": ...


class TorchPasses:
    def __init__(self, settings: HeadSettings):
        self._settings = settings
        self.bytes_per_logit = 4 + 2 * settings.split_gradient

    def forward(self, rows: Rows, keep: bool) -> tuple[torch.Tensor, RowStatistics]:
        raw = raw_logits(rows.hidden, rows.weight, self._settings.fp32)
        z = scale_(raw, rows.temperature, self._settings)
        return z, row_statistics(z, rows.label_ids)

    def gradient(
        self, kept: torch.Tensor, statistics: RowStatistics, rows: Rows, coefficients: Coefficients
    ) -> LogitsGradient:
        gradient = logits_gradient_(
            kept, statistics.logsumexp, rows.label_ids, rows.temperature, coefficients, self._settings
        )
        return round_gradient(gradient, rows.weight.dtype, self._settings.split_gradient)


class FusedPasses:
    def __init__(self, settings: HeadSettings):
        self._settings = settings
        self.bytes_per_logit = 4 + 2 * settings.split_gradient

    def forward(self, rows: Rows, keep: bool) -> tuple[torch.Tensor, RowStatistics]:
        from truestep.head import kernels

        raw = raw_logits(rows.hidden, rows.weight, self._settings.fp32)
        # On a CPU (Triton's interpreter), the backward products are float32: see `logits`.
        raw = raw if raw.is_cuda else raw.to(wide(raw.dtype))
        factor = multiplier(rows.temperature, self._settings, torch.float32)
        return raw, kernels.row_statistics(raw, rows.label_ids, factor, self._settings.softcap)

    def gradient(
        self, kept: torch.Tensor, statistics: RowStatistics, rows: Rows, coefficients: Coefficients
    ) -> LogitsGradient:
        from truestep.head import kernels

        target = rows.weight.dtype if kept.is_cuda else kept.dtype
        split = self._settings.split_gradient and target != wide(target)
        low = torch.empty_like(kept, dtype=target) if split else None
        high = kernels.logits_gradient_(
            kept,
            statistics.logsumexp,
            rows.label_ids,
            multiplier(rows.temperature, self._settings, torch.float32),
            coefficients,
            self._settings.softcap,
            target,
            low,
        )
        return LogitsGradient(high, low, kernels.to_front_)


def passes_for(settings: HeadSettings, hidden: torch.Tensor, weight: torch.Tensor) -> HeadPasses:
    if not settings.kernels or hidden.dtype == torch.float64 or not _kernels_run(hidden.device.type):
        return TorchPasses(settings)
    if _fits_the_product(settings, hidden, weight) and _product_serves(hidden.device):
        from truestep.head.numerator_passes import NumeratorPasses

        return NumeratorPasses(settings)
    return FusedPasses(settings)


@cache
def _kernels_run(device_type: str) -> bool:
    """Return whether Triton is installed and can run here: on a GPU or in its interpreter."""
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _fits_the_product(settings: HeadSettings, hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the Hopper product supports these settings and tensors: bfloat16, for its range of exponents;
    rows aligned for the copy engine (TMA); float32 logits, no softcap, a positive scale; no split gradient."""
    plain = settings.fp32 and settings.softcap is None and settings.scale > 0 and not settings.split_gradient
    typed = hidden.dtype == weight.dtype == torch.bfloat16
    laid_out = all(t.is_contiguous() and t.shape[1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in (hidden, weight))
    return plain and typed and laid_out


@cache
def _product_serves(device: torch.device) -> bool:
    """Return whether this is a Hopper GPU and the installed Triton compiles the product correctly."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False

    def check() -> str | None:
        from truestep.head.check_product import wrong

        return wrong(device)

    return serves("the head's product", "its slower kernels are used", check)
