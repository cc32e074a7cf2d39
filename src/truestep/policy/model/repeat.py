"""Rows that are picked, some of them more than once: their gradients are added up in float32 before one rounding."""

from __future__ import annotations

from typing import Any

import torch


def repeat(tensor: torch.Tensor, index: torch.Tensor, dimension: int) -> torch.Tensor:
    repeated: torch.Tensor = _Repeat.apply(tensor, index, dimension)
    return repeated


class _Repeat(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, tensor: torch.Tensor, index: torch.Tensor, dimension: int) -> torch.Tensor:
        saved.save_for_backward(index)
        saved.shape, saved.dimension = tensor.shape, dimension
        return tensor.index_select(dimension, index)

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index,) = saved.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(saved.shape, dtype=wide)
        return total.index_add_(saved.dimension, index, gradient.to(wide)).to(gradient.dtype), None, None
