"""The ranks of a run and their groups. One process is a run of one rank: the same code, and nothing to send.

    rank = (((stage · replicas + replica) · data_shard + part) · context + run) · tensor + slice

The ranks of a context or tensor group, and the stages of a pipeline, compute one micro-batch together; `data` counts
those that have micro-batches of their own. For weights, ranks that see other tokens of a micro-batch are like ranks
that see other micro-batches: they are spread over `shards` = data_shard · context ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from truestep.errors import TruestepError
from truestep.ranks.pipeline import wires

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")


class RankError(TruestepError):
    """Ranks that cannot work together."""


_BUCKET = 2**24  # numbers that go in one message, if one tensor is not more


def in_buckets(sizes: Mapping[K, int]) -> Iterator[list[K]]:
    """Neighbours that are worth one message."""
    bucket: list[K] = []
    room = _BUCKET
    for name, size in sizes.items():
        if bucket and size > room:
            yield bucket
            bucket, room = [], _BUCKET
        bucket.append(name)
        room -= size
    if bucket:
        yield bucket


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1
    shards: int = 1  # ranks that each set of weights is spread over
    context: int = 1  # ranks that have a run of tokens each of one micro-batch
    tensor: int = 1  # ranks that have a slice each of every layer
    pipeline: int = 1  # ranks that have some layers each
    host: dist.ProcessGroup | None = None  # for what lies on the host, among all ranks
    ahead: dist.ProcessGroup | None = None  # the same ranks, for what is told beside the step in hand
    mesh: DeviceMesh | None = None  # (pipeline, replicate, shard, tensor); None for a run of one
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)  # by dimension, of this rank's fellows

    @property
    def replicas(self) -> int:
        return self.size // (self.shards * self.tensor * self.pipeline)

    @property
    def data(self) -> int:
        """How many ranks, or groups of them, have micro-batches of their own."""
        return self.size // (self.context * self.tensor * self.pipeline)

    @property
    def data_rank(self) -> int:
        """Whose micro-batches this rank computes, or has a share in."""
        return self.rank // (self.context * self.tensor) % self.data

    @property
    def first(self) -> bool:
        """The rank that writes files and speaks."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        """Which part of every weight is here."""
        return self.rank // self.tensor % self.shards

    @property
    def context_rank(self) -> int:
        return self.shard % self.context

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        """Which of the pipeline's ranks this is."""
        return self.rank * self.pipeline // self.size

    def of_stage(self, stage: int) -> int:
        """The number of the rank that is in this one's place at another of the pipeline's ranks."""
        between = self.size // self.pipeline
        return stage * between + self.rank % between

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """This rank and its fellows in one dimension, or `ends`, the first and last of its pipeline. None: alone."""
        return self.groups.get(dimension)

    def gather(self, value: T, ahead: bool = False) -> list[T]:
        """Every rank's value, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.ahead if ahead else self.host)
        return values

    def gather_parts(self, value: T, ahead: bool = False) -> list[T]:
        """Of each data rank, in their order, what the first of the ranks that share its micro-batches has."""
        sharing = self.context * self.tensor
        speaks = self.rank == self.data_rank * sharing
        values: list[Any] = self.gather(value if speaks else None, ahead)
        return values[: self.data * sharing : sharing]

    def share(self, make: Callable[[], T], ahead: bool = False) -> T:
        """What rank 0 makes, on every rank. What it raises instead, every rank raises."""
        if self.size == 1:
            return make()
        made: list[Any] = [None, None]
        if self.first:
            try:
                made[0] = make()
            except Exception as error:
                made[1] = error
        dist.broadcast_object_list(made, src=0, group=self.ahead if ahead else self.host)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def spread(self, items: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> list[R]:
        """The work on all items, each done on one rank, in the items' order."""
        if self.size == 1:
            return list(work(items))
        done = self.gather(list(work(items[self.rank :: self.size])))
        return [done[index % self.size][index // self.size] for index in range(len(items))]

    def sum_over(self, dimension: str, value: torch.Tensor) -> torch.Tensor:
        """In place."""
        group = self.group(dimension)
        if group is not None:
            dist.all_reduce(value, group=group)
        return value

    def sum_all(self, dimension: str, values: Sequence[torch.Tensor]) -> None:
        """In place, small ones of a kind together."""
        if self.group(dimension) is None:
            return
        for dtype in dict.fromkeys(value.dtype for value in values):
            some = [value for value in values if value.dtype == dtype]
            for members in in_buckets({index: value.numel() for index, value in enumerate(some)}):
                bucket = [some[index] for index in members]
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    self.sum_over(dimension, bucket[0])
                    continue
                total = self.sum_over(dimension, torch.cat([value.flatten() for value in bucket]))
                for value, part in zip(bucket, total.split([value.numel() for value in bucket]), strict=True):
                    value.copy_(part.view_as(value))

    def to_first(self, value: torch.Tensor | None, like: torch.Tensor, stage: int) -> torch.Tensor | None:
        """On the first rank, what the first rank of a stage has; None elsewhere. `like` has its shape and type."""
        holder = stage * (self.size // self.pipeline)
        if holder == self.rank == 0:
            return value
        if self.rank == holder:
            assert value is not None
            dist.send(value.cpu().contiguous(), dst=0, group=self.host)
        elif self.first:
            received = torch.empty(like.shape, dtype=like.dtype)
            dist.recv(received, src=holder, group=self.host)
            return received
        return None


ALONE = Ranks()


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class RankLayout:
    """How a run's ranks are laid out."""

    data_shard: int = -1  # -1: all that the rest leaves
    data_replicate: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    def shards(self, size: int) -> int:
        """How many ranks each set of weights is spread over. Refuses a layout that does not make up the ranks."""
        rest = self.data_replicate * self.context * self.tensor * self.pipeline
        options = ("data_shard", "data_replicate", "context", "tensor", "pipeline")
        said = [f"parallel.{name}: {getattr(self, name)}" for name in options if getattr(self, name) not in (-1, 1)]
        if size % rest:
            makes = f" make a multiple of {rest}, which" if len(said) > 1 else ""
            raise RankError(f"{' x '.join(said)}{makes} does not divide the {size} ranks that were started")
        data_shard = size // rest if self.data_shard == -1 else self.data_shard
        if data_shard * rest != size:
            raise RankError(
                f"{' x '.join(said) or 'parallel.data_shard: 1'} make {data_shard * rest} ranks and {size} were "
                "started: start that many with torchrun --nproc-per-node, or set data_shard: -1"
            )
        return data_shard * self.context


def join(layout: RankLayout, *, device: str, stall_timeout: float) -> Ranks:
    """The ranks that torchrun started, laid out as `parallel` says. Nothing is allocated if they cannot be."""
    size = world_size()
    shards = layout.shards(size)
    if size == 1:
        return ALONE
    on_gpu = device != "cpu" and torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise RankError(
                f"local rank {local} has no GPU: this machine has {torch.cuda.device_count()}; start as many processes "
                "a machine as it has GPUs (torchrun --nproc-per-node), or set model.device: cpu"
            )
        torch.cuda.set_device(local)
    # A missing rank is noticed by `watch`, which can name it; this is what is left if even that fails.
    patience = timedelta(seconds=2 * stall_timeout + 60)
    if not dist.is_initialized():
        place = torch.device("cuda", local) if on_gpu else None
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=patience, device_id=place)
    return _lay_out(layout, shards, "cuda" if on_gpu else "cpu", patience)


@cache
def _lay_out(layout: RankLayout, shards: int, kind: str, patience: timedelta) -> Ranks:
    """A process that runs several things in a layout makes its groups once: each costs threads and connections."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), shards, layout.context, layout.tensor, layout.pipeline)
    shape = (layout.pipeline, ranks.replicas, shards, layout.tensor)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    host, ahead = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
    return replace(ranks, host=host, ahead=ahead, mesh=mesh, groups=_groups(ranks, mesh, patience))


def _groups(ranks: Ranks, mesh: DeviceMesh, patience: timedelta) -> dict[str, dist.ProcessGroup]:
    named: dict[str, Any] = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    # Shard and context ranks share a dimension of the mesh; and a tied weight stands at both ends of a pipeline.
    numbers = torch.arange(ranks.size)
    runs = numbers.view(-1, ranks.context, ranks.tensor).transpose(1, 2).reshape(-1, ranks.context)
    named["context"] = _own_group(ranks.rank, runs, patience)
    ends = numbers.view(ranks.pipeline, -1)[[0, -1]].T
    named["ends"] = _own_group(ranks.rank, ends, patience) if ranks.pipeline > 1 else None
    if ranks.pipeline > 1:
        lines = numbers.view(ranks.pipeline, -1).T
        named |= {name: _own_group(ranks.rank, lines, patience) for name in wires(ranks.pipeline)}
    return {name: group for name, group in named.items() if group is not None and dist.get_world_size(group) > 1}


def _own_group(rank: int, members: torch.Tensor, patience: timedelta) -> dist.ProcessGroup | None:
    """The one of these groups that this rank is in; every rank makes them all, in the same order."""
    if members.shape[1] == 1:
        return None
    own = None
    for group in members.tolist():
        made = dist.new_group(group, timeout=patience)
        if rank in group:
            own = made
    return own


def leave() -> None:
    """Give the process group back, where every rank has come to its end."""
    _lay_out.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
