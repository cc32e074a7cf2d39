"""What every weight of the whole model is, and which ranks have which piece of it.

Known on every rank alike, also of weights that are elsewhere. Sharding is not part of it: what a rank has of a weight
by this, its fellows of the shard group have too, and FSDP spreads it over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from truestep.ranks.group import Ranks


@dataclass(frozen=True)
class Piece:
    shape: torch.Size  # of the whole weight
    trained: bool = True
    # Tensor ranks have a slice each along this dimension, of the same size but for the last ones, which may have less
    # or nothing. None: each has all of the weight, and of its gradient what its own tokens or heads add.
    cut: int | None = None
    # The pipeline's ranks that have it. Two for a tied embedding: each has a part of its gradient.
    stages: tuple[int, ...] = (0,)

    def counted_on(self, ranks: Ranks) -> bool:
        """Of the ranks that have the very same values, one counts them."""
        return ranks.stage == self.stages[0] and (self.cut is not None or ranks.tensor_rank == 0)

    @staticmethod
    def slice_of(size: int, ranks: Ranks) -> tuple[int, int]:
        """Where this rank's slice of a dimension of that size begins, and how long it is."""
        most = -(-size // ranks.tensor)
        start = min(most * ranks.tensor_rank, size)
        return start, min(most, size - start)

    def slice(self, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        if self.cut is None or ranks.tensor == 1:
            return whole
        return whole.narrow(self.cut, *self.slice_of(whole.shape[self.cut], ranks))

    def join(self, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """All slices in one. Every tensor rank calls this."""
        if self.cut is None or ranks.tensor == 1:
            return part
        size = self.shape[self.cut]
        lines = part.movedim(self.cut, 0)
        padded = lines.new_zeros(-(-size // ranks.tensor), *lines.shape[1:])
        padded[: len(lines)] = lines
        slices = [torch.empty_like(padded) for _ in range(ranks.tensor)]
        dist.all_gather(slices, padded, group=ranks.group("tensor"))
        return torch.cat(slices)[:size].movedim(0, self.cut).contiguous()


def pieces_of(model: Any) -> dict[str, Piece]:
    """Of a model that is not cut: all of each weight, by name, in the model's order; a tied tensor once."""
    return {
        name: Piece(parameter.shape, trained=parameter.requires_grad) for name, parameter in model.named_parameters()
    }


def sum_parts(ranks: Ranks, pieces: dict[str, Piece], gradients: dict[str, torch.Tensor]) -> None:
    """In place, of gradients of which other tensor ranks, or the other end of the pipeline, have a part."""
    if ranks.tensor > 1:
        ranks.sum_all("tensor", [gradient for name, gradient in gradients.items() if pieces[name].cut is None])
    ranks.sum_all("ends", [gradient for name, gradient in gradients.items() if len(pieces[name].stages) > 1])
