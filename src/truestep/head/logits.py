"""The head's arithmetic for one chunk of rows: logits, their statistics, and the two backward products.

Dimensions: C rows of a chunk, H hidden, V vocabulary.

Precision: the product of two bfloat16 numbers is exact in float32. So a GPU's bfloat16 matrix product with float32
output gives the logits of a float32 head (`fp32_lm_head`) at the speed of bfloat16. A CPU has no such product: there,
blocks of the weight are converted to float32, and gradients stay float32.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from truestep.gpu.memory import free_memory
from truestep.types import Coefficients, RowStatistics

log = logging.getLogger(__name__)

_BLOCK_BYTES = 64 * 2**20
# More rows per chunk do not make matrix products faster: 8,192, or twice as many if a logit takes half the memory.
_MOST_ROWS, _MOST_ROW_BYTES = 8192, 32768
# The share of the free memory that a chunk of logits may take.
_SHARE = 0.5
# Bytes of a chunk if runs must be bitwise reproducible: free memory differs from run to run.
_FIXED_BYTES = {"cuda": 2**30, "cpu": 2**26}


@dataclass(frozen=True)
class HeadSettings:
    """How the head computes logits and their gradient."""

    fp32: bool = False  # logits are never rounded to half precision
    softcap: float | None = None
    scale: float = 1.0  # factor of the logits
    chunk_size: int | None = None  # rows of logits in memory at a time; None: chosen by free memory and shape
    deterministic: bool = False  # choose `chunk_size` only by the shape
    split_gradient: bool = False  # represent dL/dlogits as the sum of two half-precision numbers
    kernels: bool = True  # use the fused kernels where they run

    def rows_per_chunk(self, rows: int, vocabulary: int, bytes_per_logit: int, device: torch.device) -> int:
        if self.chunk_size is not None:
            return self.chunk_size
        if self.deterministic:  # not by `bytes_per_logit` either, which depends on the kernels
            useful, room = _MOST_ROWS, _FIXED_BYTES.get(device.type, _FIXED_BYTES["cpu"]) // (4 * vocabulary)
        else:
            useful = max(_MOST_ROWS, _MOST_ROW_BYTES // bytes_per_logit)
            room = _free_bytes(device) // (vocabulary * bytes_per_logit)
        most = max(1, min(useful, room))
        # Chunks of about equal size: the matrix products of a small last chunk would be inefficient.
        chunks = max(1, -(-rows // most))
        chosen = -(-rows // chunks)
        _log_choice(chosen, vocabulary, str(device))
        return max(1, chosen)


@dataclass(frozen=True)
class Rows:
    """Some of the rows that predict labels, and the head's weight."""

    hidden: torch.Tensor  # [C, H]
    weight: torch.Tensor  # [V, H]
    label_ids: torch.Tensor  # [C]
    temperature: torch.Tensor  # [C]


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**26
    return int(free_memory(device) * _SHARE)


@cache
def _log_choice(rows: int, vocabulary: int, device: str) -> None:
    log.info("logits_chunk_size: auto is %d rows of %d logits on %s", rows, vocabulary, device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def _weight_blocks(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield copies of blocks of the weight's rows in the wide dtype, so that no copy of the whole weight exists."""
    rows = max(1, _BLOCK_BYTES // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        block = slice(start, min(start + rows, weight.shape[0]))
        yield block, weight[block].to(wide(weight.dtype))


def raw_logits(hidden: torch.Tensor, weight: torch.Tensor, fp32: bool) -> torch.Tensor:  # [C, H], [V, H] -> [C, V]
    """Compute h Wᵀ in float32 or wider; without `fp32`, round it to the dtype of the inputs."""
    if not fp32 or hidden.dtype == wide(hidden.dtype):
        return hidden @ weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    z = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    for block, block_weight in _weight_blocks(weight):
        torch.mm(hidden.float(), block_weight.T, out=z[:, block])
    return z


def scale_(raw: torch.Tensor, temperature: torch.Tensor, settings: HeadSettings) -> torch.Tensor:  # [C, V], [C]
    """Compute z = softcap(raw) · scale / temperature, in place if `raw` has the wide dtype."""
    z = raw.to(wide(raw.dtype))
    if settings.softcap is not None:
        z = z.div_(settings.softcap).tanh_().mul_(settings.softcap)
    return z.mul_(multiplier(temperature, settings, z.dtype)[:, None])


def multiplier(temperature: torch.Tensor, settings: HeadSettings, dtype: torch.dtype) -> torch.Tensor:  # [C]
    return settings.scale / temperature.to(dtype)


def scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor, settings: HeadSettings
) -> torch.Tensor:  # [C, H], [V, H], [C] -> [C, V]
    """Compute z = softcap(h Wᵀ) · scale / temperature, in float32 or wider."""
    return scale_(raw_logits(hidden, weight, settings.fp32), temperature, settings)


def row_statistics(z: torch.Tensor, label_ids: torch.Tensor) -> RowStatistics:  # [C, V], [C]
    logsumexp = z.logsumexp(-1)
    label_logit = z.gather(-1, label_ids[:, None]).squeeze(-1)
    # H = logsumexp - Σ p z, with z shifted by logsumexp so that large logits do not cancel.
    log_p = z - logsumexp[:, None]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return RowStatistics(label_logit - logsumexp, entropy, logsumexp)


def logits_gradient_(
    z: torch.Tensor,
    logsumexp: torch.Tensor,
    label_ids: torch.Tensor,
    temperature: torch.Tensor,
    coefficients: Coefficients,
    settings: HeadSettings,
) -> torch.Tensor:  # [C, V], written over z
    """Compute dL/d(h Wᵀ): `p·(a + b·log p) - c·onehot(y)` times the derivative of scale, temperature and softcap."""
    chain = multiplier(temperature, settings, z.dtype)[:, None]
    slope = None
    if settings.softcap is not None:
        slope = 1 - (z / (chain * settings.softcap)).square()
    log_p = z.sub_(logsumexp[:, None])
    if coefficients.b is None:
        gradient = log_p.exp_().mul_(coefficients.a.to(z.dtype)[:, None])
    else:
        factor = log_p * coefficients.b.to(z.dtype)[:, None] + coefficients.a.to(z.dtype)[:, None]
        gradient = log_p.exp_().mul_(factor)
    gradient.scatter_add_(-1, label_ids[:, None], -coefficients.c.to(z.dtype)[:, None])
    gradient.mul_(chain)
    return gradient if slope is None else gradient.mul_(slope)


def to_front_(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Move the given rows to the front in place, block by block. Indices must ascend, so that no row is overwritten
    before its read."""
    most = max(1, _BLOCK_BYTES // (tensor.shape[1] * tensor.itemsize))
    for start in range(0, len(rows), most):
        block = rows[start : start + most]
        tensor[start : start + len(block)] = tensor[block]
    return tensor[: len(rows)]


@dataclass(frozen=True)
class LogitsGradient:
    """The gradient dL/d(h Wᵀ), and its two backward products."""

    high: torch.Tensor  # [C, V] in the weight's dtype, or wider
    low: torch.Tensor | None = None  # [C, V] the rounding error of `high`
    to_front_: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = to_front_

    @property
    def _parts(self) -> list[torch.Tensor]:
        return [self.high] if self.low is None else [self.high, self.low]

    def select_(self, rows: torch.Tensor) -> "LogitsGradient":
        """Keep only the given rows, in place; indices must ascend."""
        low = None if self.low is None else self.to_front_(self.low, rows)
        return replace(self, high=self.to_front_(self.high, rows), low=low)

    def of_hidden_(self, weight: torch.Tensor, out: torch.Tensor) -> None:  # [V, H], [C, H]
        """Write the gradient of the hidden states into `out`, which is float32 or wider."""
        if self.high.dtype == weight.dtype == out.dtype:
            torch.mm(self.high, weight, out=out)
        elif weight.is_cuda:
            first, *others = self._parts
            torch.mm(first, weight, out_dtype=out.dtype, out=out)
            for part in others:
                torch.addmm(out, part, weight, out_dtype=out.dtype, out=out)
        else:
            out.zero_()
            for block, block_weight in _weight_blocks(weight):
                out.addmm_(self.high[:, block], block_weight)

    def add_of_weight_(self, buffer: torch.Tensor, hidden: torch.Tensor) -> None:  # [V, H], [C, H]
        """Add the weight's gradient to the float32 buffer inside the matrix product, so that nothing is rounded before
        the sum."""
        for part in self._parts:
            if part.is_cuda and part.dtype != buffer.dtype:
                torch.addmm(buffer, part.T, hidden, out_dtype=buffer.dtype, out=buffer)
            else:
                buffer.addmm_(part.T, hidden.to(part.dtype))


def round_gradient(gradient: torch.Tensor, dtype: torch.dtype, split: bool) -> "LogitsGradient":
    """Round a gradient on a GPU to the weight's dtype for the backward products; on a CPU, keep it as it is."""
    if not gradient.is_cuda or gradient.dtype == dtype:
        return LogitsGradient(gradient)
    high = gradient.to(dtype)
    return LogitsGradient(high, (gradient - high).to(dtype) if split else None)
