"""A gather of rows whose backward pass sums in float32 and rounds once, for rows that are gathered repeatedly."""

import torch

from truestep.ranks.exchange import transfer


def repeat(tensor: torch.Tensor, index: torch.Tensor, dimension: int) -> torch.Tensor:
    shape = tensor.shape

    def add_up(gradient: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(shape, dtype=wide)
        return total.index_add_(dimension, index, gradient.to(wide)).to(gradient.dtype)

    return transfer(tensor, lambda rows: rows.index_select(dimension, index), add_up)
