"""Gathers each sharded matrix on one rank for some work, and scatters the result.

The ranks that have parts or copies of the same weights divide the matrices among themselves: each rank gathers one of
`workers` consecutive matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from truestep.process import progress
from truestep.ranks.axes import CUT, largest_slice
from truestep.weights.protocol import Weights


class _Level(NamedTuple):
    """A gather of a matrix's parts, from a group of ranks to its owner."""

    group: dist.ProcessGroup
    owner: int  # rank within the group
    dimension: int
    size: int  # size of the whole matrix along `dimension`

    @property
    def here(self) -> bool:
        return dist.get_rank(self.group) == self.owner

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def collect(self, part: torch.Tensor) -> torch.Tensor | None:
        """Gather the parts on the owner; return None on other ranks."""
        sent = self._padded(part)
        received = [torch.empty_like(sent) for _ in range(self.ranks)] if self.here else None
        dist.gather(sent, received, group=self.group, group_dst=self.owner)
        return None if received is None else torch.cat(received)[: self.size].movedim(0, self.dimension)

    def deal(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Scatter the owner's matrix (None on other ranks); `like` has the shape of this rank's part."""
        received = self._padded(like)
        sent = None
        if whole is not None:
            lines = whole.movedim(self.dimension, 0)
            rows = len(received)
            sent = [lines.new_zeros(received.shape) for _ in range(self.ranks)]
            for place, slice_ in zip(sent, (lines[rows * n : rows * (n + 1)] for n in range(self.ranks)), strict=True):
                place[: len(slice_)] = slice_
        dist.scatter(received, sent, group=self.group, group_src=self.owner)
        return received[: like.shape[self.dimension]].movedim(0, self.dimension)

    def _padded(self, part: torch.Tensor) -> torch.Tensor:
        lines = part.movedim(self.dimension, 0)
        padded = lines.new_zeros(largest_slice(self.size, self.ranks), *lines.shape[1:])
        padded[: len(lines)] = lines
        return padded


@dataclass(frozen=True)
class WholeMatrices:
    """The division of a pipeline stage's matrices among its ranks."""

    weights: Weights

    @property
    def workers(self) -> int:
        """The number of matrices per round: one per rank."""
        return self._replicas * self._shards * self._slices

    @property
    def _replicas(self) -> int:
        group = self.weights.ranks.group("replicate")
        return 1 if group is None else dist.get_world_size(group)

    @property
    def _shards(self) -> int:
        return self.weights.ranks.shards

    @property
    def _slices(self) -> int:
        return self.weights.ranks.tensor

    def each(
        self, names: Sequence[str], part_of: Callable[[str], torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run `work` on each whole matrix, on one rank, and return this rank's part of each result.

        `part_of` makes this rank's part; it is not called for matrices that another replica works on."""
        gradients = self.weights.gradients  # for the sizes of this rank's parts
        likes: list[torch.Tensor] = []
        results: list[torch.Tensor | None] = []
        for number, name in enumerate(names):
            collected = self._collect(number, name, part_of) if self._in_replica(number) else None
            results.append(None if collected is None else work(collected))
            likes.append(gradients[name])
            progress.made("matrices worked on")
        return [self._deal(number, *pair) for number, pair in enumerate(zip(names, results, likes, strict=True))]

    def _places(self, number: int) -> tuple[int, int, int]:
        """Return the replica, shard and slice of the rank that works on a matrix."""
        rest, slice_ = divmod(number, self._slices)
        rest, shard = divmod(rest, self._shards)
        return rest % self._replicas, shard, slice_

    def _in_replica(self, number: int) -> bool:
        group = self.weights.ranks.group("replicate")
        return group is None or dist.get_rank(group) == self._places(number)[0]

    def _levels(self, number: int, name: str) -> tuple[_Level | None, _Level | None, bool]:
        """Return the two gathers of a matrix, over shards and over tensor ranks (None: no gather), and whether this
        rank takes part in the second."""
        ranks, piece = self.weights.ranks, self.weights.pieces[name]
        _, shard, slice_ = self._places(number)
        (axis,) = CUT
        dimension = piece.cut.get(axis)
        group = ranks.group(axis)
        tensor = None
        if group is not None and dimension is not None:
            tensor = _Level(group, slice_, dimension, piece.shape[dimension])
        rows = piece.slice(torch.empty(piece.shape, device="meta"), ranks).shape[0]
        spread = ranks.group("shard")
        sharded = None if spread is None else _Level(spread, shard, 0, rows)
        return sharded, tensor, sharded is None or sharded.here

    def _collect(self, number: int, name: str, part_of: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
        sharded, tensor, goes_on = self._levels(number, name)
        part: torch.Tensor | None = part_of(name)
        if sharded is not None and part is not None:
            part = sharded.collect(part)
        if tensor is not None and goes_on and part is not None:
            part = tensor.collect(part)
        group = self.weights.ranks.group(CUT[0])
        if tensor is None and group is not None and dist.get_rank(group) != self._places(number)[2]:
            return None  # every tensor rank has the whole matrix, and another one works on it
        return part

    def _deal(self, number: int, name: str, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Scatter a result from the rank that has it, and return this rank's part."""
        part = torch.empty(like.shape, dtype=like.dtype, device=self.weights.device)
        if self._in_replica(number):
            sharded, tensor, goes_on = self._levels(number, name)
            if goes_on:
                whole = self._deal_slices(number, name, tensor, whole, part)
            if sharded is not None:
                part = sharded.deal(whole, part)
            elif whole is not None:
                part = whole
        replicas = self.weights.ranks.group("replicate")
        if replicas is not None:
            part = part.contiguous()
            dist.broadcast(part, group=replicas, group_src=self._places(number)[0])
        return part

    def _deal_slices(
        self, number: int, name: str, tensor: _Level | None, whole: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Scatter slices to the tensor ranks, or broadcast a matrix that is not sliced."""
        group, piece = self.weights.ranks.group(CUT[0]), self.weights.pieces[name]
        if group is None:
            return whole
        shape = piece.slice(torch.empty(piece.shape, device="meta"), self.weights.ranks).shape
        room = like.new_empty(shape)
        if tensor is not None:
            return tensor.deal(whole, room)
        room = room if whole is None else whole.contiguous()
        dist.broadcast(room, group=group, group_src=self._places(number)[2])
        return room
