"""Products, sums and log-sum-exps of rows: Triton kernels on a GPU, plain torch elsewhere.

Dimensions: M rows, N columns, K terms of a sum.
"""

import os

import torch

from truestep.numerics import plain


def by_kernels(x: torch.Tensor) -> bool:
    """Return whether Triton computes with this tensor: on a GPU or in its interpreter, and not in float64."""
    there = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return there and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:  # [M, K], [N, K], [N] -> [M, N]
    """Compute a bᵀ + bias in float32 or wider, rounded once at the end, to `dtype` or that of `a`."""
    if by_kernels(a):
        from truestep.numerics import kernels

        return kernels.product(a, b, bias, dtype)
    result = plain.product(a, b)
    return (result if bias is None else result + bias).to(dtype or a.dtype)


def row_sum(x: torch.Tensor) -> torch.Tensor:  # [..., K] -> [...]
    """Sum each row in float32 or wider."""
    if by_kernels(x):
        from truestep.numerics import kernels

        return kernels.row_sum(x)
    return plain.row_sum(x)


def row_mean(x: torch.Tensor) -> torch.Tensor:  # [..., K] -> [...]
    if by_kernels(x):
        from truestep.numerics import kernels

        return kernels.row_sum(x, x.shape[-1])
    return plain.row_sum(x) / x.shape[-1]


def logsumexp(z: torch.Tensor) -> torch.Tensor:  # [M, N] -> [M]
    if by_kernels(z):
        from truestep.numerics import kernels

        return kernels.logsumexp(z)
    return plain.logsumexp(z)
