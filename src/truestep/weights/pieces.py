"""The pieces of every weight of the uncut model, and the ranks that have them; known on every rank alike.

Sharding is not part of it: FSDP spreads a rank's piece over the shard group, whose ranks all have the same piece.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from truestep.ranks.axes import CUT, largest_slice, slice_at
from truestep.ranks.group import Ranks


@dataclass(frozen=True)
class Piece:
    shape: torch.Size  # of the uncut weight
    trained: bool = True
    # The tensor's dimension that is cut over each dimension of the ranks. Slices have the same size, but the last ones
    # may have less or nothing. Ranks that it is not cut over have all of it, and of its gradient what their own tokens
    # or heads add.
    cut: Mapping[str, int] = field(default_factory=dict)
    # The pipeline's ranks that have it. A tied embedding is on two, each with a part of its gradient.
    stages: tuple[int, ...] = (0,)
    at_end: bool = False  # it is the embedding or the head

    def counted_on(self, ranks: Ranks) -> bool:
        """True on one of the ranks that have the very same values: a sum over all weights counts them there."""
        return ranks.stage == self.stages[0] and all(axis in self.cut or ranks.place_on(axis) == 0 for axis in CUT)

    def with_width(self, width: int | None) -> "Piece":
        """Describe a tensor that is cut as this weight is, and has another last dimension. None: the same."""
        return self if width is None else replace(self, shape=torch.Size((*self.shape[:-1], width)))

    def slice(self, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        for axis, dimension in self.cut.items():
            tensor = tensor.narrow(dimension, *slice_of(tensor.shape[dimension], ranks, axis))
        return tensor

    def join(self, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Join all slices. Every rank of the dimensions that the weight is cut over calls this."""
        shape, cuts = list(self.shape), []
        for axis, dimension in self.cut.items():
            cuts.append((axis, dimension, shape[dimension]))
            shape[dimension] = slice_of(shape[dimension], ranks, axis)[1]
        for axis, dimension, size in reversed(cuts):
            count = ranks.size_of(axis)
            if count > 1:
                lines = part.movedim(dimension, 0)
                padded = lines.new_zeros(largest_slice(size, count), *lines.shape[1:])
                padded[: len(lines)] = lines
                slices = [torch.empty_like(padded) for _ in range(count)]
                dist.all_gather(slices, padded, group=ranks.group(axis))
                part = torch.cat(slices)[:size].movedim(0, dimension).contiguous()
        return part


def slice_of(size: int, ranks: Ranks, axis: str) -> tuple[int, int]:
    """Find where this rank's slice of a dimension of that size begins, and how long it is."""
    return slice_at(size, ranks.size_of(axis), ranks.place_on(axis))


def pieces_of(model: Any) -> dict[str, Piece]:
    """Describe a model that is not cut: its weights by name, in the model's order; a tied tensor once."""
    getters = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    ends = [getattr(getter(), "weight", None) for getter in getters if getter is not None]
    return {
        name: Piece(parameter.shape, trained=parameter.requires_grad, at_end=any(parameter is end for end in ends))
        for name, parameter in model.named_parameters()
    }


def sum_parts(ranks: Ranks, pieces: dict[str, Piece], gradients: dict[str, torch.Tensor]) -> None:
    """Sum, in place, gradients of which tensor ranks, or both ends of the pipeline, have a part each."""
    for axis in CUT:
        ranks.sum_all(axis, [gradient for name, gradient in gradients.items() if axis not in pieces[name].cut])
    ranks.sum_all("ends", [gradient for name, gradient in gradients.items() if len(pieces[name].stages) > 1])
