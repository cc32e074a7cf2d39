"""Describes how the weights of the uncut model are cut, and which ranks have them. The description is the same on every
rank.

Sharding is not included: all ranks of a shard group have the same slice, and FSDP shards it among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from truestep.ranks.axes import CUT, DERIVED, largest_slice, slice_at
from truestep.ranks.group import Ranks


@dataclass(frozen=True)
class WeightSlice:
    """A weight of the uncut model, and how it is cut into slices for ranks."""

    shape: torch.Size  # the shape of the uncut weight
    trained: bool = True
    # Maps an axis of the ranks to the dimension of the weight that is cut over it. Slices have equal size; the last
    # ones may be smaller or empty. Along other axes every rank has the whole weight, and a partial gradient (from its
    # tokens or heads). Over the derived axis `expert`, each rank has some whole experts, and their gradient summed over
    # all tokens of its group.
    cut: Mapping[str, int] = field(default_factory=dict)
    # The pipeline ranks that have the weight. A tied embedding is on two ranks, each with a partial gradient.
    stages: tuple[int, ...] = (0,)
    at_end: bool = False  # whether the weight is the embedding's or the head's

    def counted_on(self, ranks: Ranks) -> bool:
        """Return whether sums over all weights count this rank's slice. If several ranks have equal values, only one of
        them counts the slice."""
        return ranks.stage == self.stages[0] and all(self.is_cut(axis) or ranks.place_on(axis) == 0 for axis in CUT)

    def is_cut(self, axis: str) -> bool:
        """Tell whether the ranks of an axis have different parts of this weight."""
        return axis in self.cut or any(axis in DERIVED[name] for name in self.cut if name in DERIVED)

    def shard_of(self, ranks: Ranks) -> tuple[int, int]:
        """Return the number of ranks over which this rank's slice is sharded, and the index of its shard."""
        derived = next((name for name in self.cut if name in DERIVED), None)
        if derived is None:
            return ranks.shards, ranks.shard
        layout = ranks.layout
        return layout.count(DERIVED[derived]) // layout.every[derived], layout.derived_place(ranks.rank, derived)[0]

    def slice(self, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        for axis, dimension in self.cut.items():
            tensor = tensor.narrow(dimension, *slice_of(tensor.shape[dimension], ranks, axis))
        return tensor

    def join(self, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """All-gather the slices of a weight. Every rank of the axes that the weight is cut over calls this."""
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
    """Return the start and length of this rank's slice of a dimension that is cut over an axis."""
    return slice_at(size, ranks.size_of(axis), ranks.place_on(axis))


def pieces_of(model: Any) -> dict[str, WeightSlice]:
    """Return the pieces of an uncut model's weights by name, in the model's order. A tied weight appears once."""
    getters = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    ends = [getattr(getter(), "weight", None) for getter in getters if getter is not None]
    return {
        name: WeightSlice(
            parameter.shape, trained=parameter.requires_grad, at_end=any(parameter is end for end in ends)
        )
        for name, parameter in model.named_parameters()
    }


def sum_parts(ranks: Ranks, pieces: dict[str, WeightSlice], gradients: dict[str, torch.Tensor]) -> None:
    """Sum partial gradients over ranks, in place: uncut weights over tensor ranks, tied embeddings over the first and
    last pipeline ranks."""
    for axis in CUT:
        ranks.sum_all(axis, [gradient for name, gradient in gradients.items() if not pieces[name].is_cut(axis)])
    ranks.sum_all("ends", [gradient for name, gradient in gradients.items() if len(pieces[name].stages) > 1])
