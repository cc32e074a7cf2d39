"""What the head computes for one chunk of rows: logits, their statistics, and the two backward products.

Dimensions: C rows of a chunk, H hidden, V vocabulary.

Precision. bfloat16 products are exact in float32, so with `fp32_lm_head` the logits are those of a float32 head
without a float32 matrix product wherever the hardware has a bfloat16 product with float32 output. A CPU has none:
there, blocks of the weight are upcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from truestep.types import Coefficients, RowStatistics

_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class HeadSettings:
    fp32: bool = False  # logits are never rounded to half precision
    softcap: float | None = None
    scale: float = 1.0  # of the logits
    chunk_size: int | None = None  # rows of logits that exist at a time; None: chosen from the shape

    def rows_per_chunk(self, vocabulary: int, device: torch.device) -> int:
        if self.chunk_size is not None:
            return self.chunk_size
        logits_bytes = 2**30 if device.type == "cuda" else 2**26
        return max(1, logits_bytes // (4 * vocabulary))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def _weight_blocks(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of the weight's rows in the wide type, never a whole copy."""
    rows = max(1, _BLOCK_BYTES // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        block = slice(start, min(start + rows, weight.shape[0]))
        yield block, weight[block].to(wide(weight.dtype))


def scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor, settings: HeadSettings
) -> torch.Tensor:  # [C, H], [V, H], [C] -> [C, V]
    """z = softcap(h Wᵀ) · scale / temperature, in float32 or wider."""
    z = _product(hidden, weight, settings.fp32)
    if settings.softcap is not None:
        z = z.div_(settings.softcap).tanh_().mul_(settings.softcap)
    return z.mul_((settings.scale / temperature.to(z.dtype))[:, None])


def _product(hidden: torch.Tensor, weight: torch.Tensor, fp32: bool) -> torch.Tensor:
    if hidden.dtype == wide(hidden.dtype):
        return hidden @ weight.T
    if not fp32:
        return (hidden @ weight.T).float()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    z = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    for block, block_weight in _weight_blocks(weight):
        torch.mm(hidden.float(), block_weight.T, out=z[:, block])
    return z


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
    """d loss / d (h Wᵀ): `p·(a + b·log p) - c·onehot(y)` times the derivatives of scale, temperature and softcap."""
    multiplier = (settings.scale / temperature.to(z.dtype))[:, None]
    slope = None
    if settings.softcap is not None:
        slope = 1 - (z / (multiplier * settings.softcap)).square()
    log_p = z.sub_(logsumexp[:, None])
    if coefficients.b is None:
        gradient = log_p.exp_().mul_(coefficients.a.to(z.dtype)[:, None])
    else:
        factor = log_p * coefficients.b.to(z.dtype)[:, None] + coefficients.a.to(z.dtype)[:, None]
        gradient = log_p.exp_().mul_(factor)
    gradient.scatter_add_(-1, label_ids[:, None], -coefficients.c.to(z.dtype)[:, None])
    gradient.mul_(multiplier)
    return gradient if slope is None else gradient.mul_(slope)


def hidden_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # [C, V], [V, H] -> [C, H]
    """In float32 or wider, before its one cast."""
    if weight.dtype == wide(weight.dtype):
        return gradient @ weight
    if weight.is_cuda:
        return torch.mm(gradient.to(weight.dtype), weight, out_dtype=torch.float32)
    total = gradient.new_zeros(gradient.shape[0], weight.shape[1])
    for block, block_weight in _weight_blocks(weight):
        total.addmm_(gradient[:, block], block_weight)
    return total


def add_weight_gradient_(buffer: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """buffer[V, H] += gradientᵀ[V, C] · hidden[C, H], accumulated in the buffer's float32."""
    if hidden.is_cuda and hidden.dtype != wide(hidden.dtype):
        buffer.add_(torch.mm(gradient.to(hidden.dtype).T, hidden, out_dtype=torch.float32))
    else:
        buffer.addmm_(gradient.T, hidden.to(gradient.dtype))
