"""Products, sums and functions of rows in plain torch: slow, but a row has the same bits in any batch.

Torch's own products and sums choose the order of additions by the shape of the whole tensor. Here tensors are
multiplied and added elementwise, which is correctly rounded, so the order is the one in this module. Padding with zeros
changes nothing: blocks are added in order, and a block of zeros adds zero.

Dimensions: M rows, N columns, K terms of a sum.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

_BLOCK = 16  # terms that are added as a tree; the tree sums are then added in order
_MOST_TERMS = 2**20  # most terms in memory at a time
# Torch's vectorised functions use other code, with other rounding, for the elements after the last full vector. So each
# call gets whole vectors, and too few numbers for torch to divide among threads.
_VECTORS, _NUMBERS = 64, 8192


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # [..., M, K], [..., N, K] -> [..., M, N]
    """Compute a bᵀ in float32, or in float64 for float64 inputs."""
    kind = wide(a.dtype)
    a, b = (pad(tensor.to(kind), (0, -tensor.shape[-1] % _BLOCK)) for tensor in (a, b))
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    each = max(1, b.shape[-2] * b.shape[-1] * max(1, batch.numel()))
    step = max(1, _MOST_TERMS // each)
    parts = [
        _add_up(a[..., first : first + step, None, :] * b[..., None, :, :]) for first in range(0, a.shape[-2], step)
    ]
    return torch.cat(parts, dim=-2) if parts else a.new_zeros(*batch, 0, b.shape[-2])


def row_sum(x: torch.Tensor) -> torch.Tensor:  # [..., K] -> [...]
    """Sum each row in float32, or in float64 for float64 inputs."""
    return _add_up(pad(x.to(wide(x.dtype)), (0, -x.shape[-1] % _BLOCK)))


def _add_up(terms: torch.Tensor) -> torch.Tensor:  # [..., K] -> [...]
    terms = terms.unflatten(-1, (-1, _BLOCK))
    width = _BLOCK
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    blocks = terms.squeeze(-1)
    total = blocks[..., 0].clone()
    for number in range(1, blocks.shape[-1]):
        total += blocks[..., number]
    return total


def each(function: Callable[..., torch.Tensor], x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Apply an elementwise function so that the result does not depend on an element's index in the tensor."""
    if x.device.type != "cpu" or not x.is_floating_point():
        return function(x, *arguments, **options)
    flat = x.reshape(-1)
    filled = pad(flat, (0, -len(flat) % _VECTORS), value=0.5)
    parts = [function(part.clone(), *arguments, **options) for part in filled.split(_NUMBERS)]
    return torch.cat(parts)[: len(flat)].view(x.shape) if parts else function(x, *arguments, **options)


def logsumexp(z: torch.Tensor) -> torch.Tensor:  # [M, N] -> [M]
    highest = z.amax(-1)
    total = row_sum(each(torch.exp, z - highest[:, None]))
    return highest + each(torch.log, total)
