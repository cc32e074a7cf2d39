"""The ranks of a run and their groups. One process is a run of one rank: the same code, and nothing to send.

Weights are sharded over the ranks of a row of the mesh and replicated over its rows:

    rank = replica · shards + shard
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from truestep.errors import TruestepError

T = TypeVar("T")
R = TypeVar("R")


class RankError(TruestepError):
    """Ranks that cannot work together."""


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1
    shards: int = 1
    host: dist.ProcessGroup | None = None  # for what lies on the host, among all ranks
    ahead: dist.ProcessGroup | None = None  # the same ranks, for what is told beside the step in hand
    mesh: DeviceMesh | None = None  # (replicate, shard); None for a run of one

    @property
    def replicas(self) -> int:
        return self.size // self.shards

    @property
    def first(self) -> bool:
        """The rank that writes files and speaks."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        """Which part of every weight is here."""
        return self.rank % self.shards

    def gather(self, value: T, ahead: bool = False) -> list[T]:
        """Every rank's value, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.ahead if ahead else self.host)
        return values

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

    def sum_over_shards(self, value: torch.Tensor) -> torch.Tensor:
        """In place, over the ranks that hold the other parts of one set of weights."""
        if self.mesh is not None and self.shards > 1:
            dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value

    def sum_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """In place, over the ranks that hold the same part of the weights."""
        if self.mesh is not None and self.replicas > 1:
            dist.all_reduce(value, group=self.mesh.get_group("replicate"))
        return value


ALONE = Ranks()


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(*, device: str, data_shard: int, data_replicate: int, stall_timeout: float) -> Ranks:
    """The ranks that torchrun started, laid out as `parallel` says. Nothing is allocated if they cannot be."""
    size = world_size()
    shards = _shards(size, data_shard, data_replicate)
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
    mesh = init_device_mesh(
        "cuda" if on_gpu else "cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard")
    )
    host, ahead = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
    return Ranks(dist.get_rank(), size, shards, host, ahead, mesh)


def _shards(size: int, data_shard: int, data_replicate: int) -> int:
    """How many ranks each set of weights is spread over."""
    if size % data_replicate:
        raise RankError(f"parallel.data_replicate: {data_replicate} does not divide the {size} ranks that were started")
    shards = size // data_replicate if data_shard == -1 else data_shard
    if shards * data_replicate != size:
        raise RankError(
            f"parallel.data_shard: {data_shard} x parallel.data_replicate: {data_replicate} make "
            f"{data_shard * data_replicate} ranks and {size} were started: start that many with torchrun "
            "--nproc-per-node, or set data_shard: -1"
        )
    return shards


def leave() -> None:
    """Give the process group back, where every rank has come to its end."""
    if dist.is_initialized():
        dist.destroy_process_group()
