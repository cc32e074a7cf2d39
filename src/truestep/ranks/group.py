"""The ranks of a run, their process groups, and communication on the host. One process is a run of one rank.

The ranks of a context or tensor group, and the stages of a pipeline, compute a micro-batch together. `data` is the
number of data ranks, which have micro-batches of their own. Weights are sharded over `shards` = data_shard · context
ranks.
"""

import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from truestep.errors import MachineError
from truestep.process import progress
from truestep.ranks.axes import CUT, DATA, DERIVED, GROUPS, MESH, SPREAD, TOGETHER, TOKENS, RankError, RankLayout
from truestep.ranks.elastic import RankLostError
from truestep.ranks.pipeline import wires

T = TypeVar("T")
R = TypeVar("R")


class NoDeviceError(RankError, MachineError):
    """A rank has no GPU."""


# torch's timeouts are off: ranks may wait for a slow rank, and `watch` ends a run that stalls.
_NO_CLOCK = timedelta(days=7)
_connections = itertools.count()  # process groups that this process has made so far: equal on all ranks
_BUCKET = 2**24  # numbers in one message, unless a single tensor has more


def in_buckets(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide items into consecutive buckets of at most `_BUCKET`, or a single larger item."""
    bucket: list[T] = []
    room = _BUCKET
    for item in items:
        size = size_of(item)
        if bucket and size > room:
            yield bucket
            bucket, room = [], _BUCKET
        bucket.append(item)
        room -= size
    if bucket:
        yield bucket


def divide(costs: Sequence[float], count: int, kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Divide items into `count` shares of similar cost, and return the items' indices. The most expensive items come
    first, and each goes to the cheapest share so far. Items of one kind stay together up to the cost of a fair
    share."""
    together: dict[Hashable, list[int]] = {}
    for index in range(len(costs)):
        together.setdefault(index if kinds is None else kinds[index], []).append(index)
    fair = sum(costs) / count
    bundles: list[list[int]] = []
    for members in together.values():
        bundle: list[int] = []
        for index in members:
            if bundle and sum(costs[other] for other in bundle) + costs[index] > fair:
                bundles.append(bundle)
                bundle = []
            bundle.append(index)
        bundles.append(bundle)
    bundles.sort(key=lambda bundle: (-sum(costs[index] for index in bundle), bundle))
    shares: list[list[int]] = [[] for _ in range(count)]
    spent = [0.0] * count
    for bundle in bundles:
        least = min(range(count), key=lambda share: (spent[share], share))
        shares[least] += bundle
        spent[least] += sum(costs[index] for index in bundle)
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, and the groups and numbers of this process's own rank."""

    rank: int = 0
    layout: RankLayout = field(default_factory=lambda: RankLayout(data_shard=1))
    host: dist.ProcessGroup | None = None  # gloo, all ranks, for objects and host tensors
    ahead: dist.ProcessGroup | None = None  # as `host`, for another thread that plans the next step
    sampling: dist.ProcessGroup | None = None  # as `host`, for another thread that spreads requests of sampling
    team: dist.ProcessGroup | None = None  # gloo, the ranks that together have all slices of the weights
    mesh: DeviceMesh | None = None  # with the dimensions of MESH; None: one rank
    # The mesh with `replicate`, and `shard`: the ranks over which this rank's experts are sharded. None: experts are
    # sharded like other weights.
    expert_mesh: DeviceMesh | None = None
    # The groups that this rank is in, by the names of GROUPS and DERIVED; `ends`: first and last rank of its pipeline;
    # and `wires`.
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    def size_of(self, axis: str) -> int:
        return self.layout.every[axis]

    def place_on(self, axis: str) -> int:
        if axis in DERIVED:
            return self.layout.derived_place(self.rank, axis)[1]
        return self.layout.places(self.rank)[axis]

    @property
    def size(self) -> int:
        return math.prod(self.layout.sizes)

    @property
    def first(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    @property
    def data(self) -> int:
        """The number of data ranks. A data rank is a rank, or a group of ranks, with micro-batches of its own."""
        return self.layout.count(DATA)

    @property
    def data_rank(self) -> int:
        """The number of the data rank to which this rank belongs."""
        return self.layout.number(self.rank, DATA)

    @property
    def token_share(self) -> int:
        """The number of ranks over which a micro-batch's tokens are split between layers."""
        return self.layout.count(TOKENS)

    @property
    def first_of_stage(self) -> bool:
        """True on the first of the ranks that compute the same micro-batches in the same stage."""
        return self.layout.number(self.rank, TOGETHER) == 0

    @property
    def shards(self) -> int:
        """The number of ranks over which the weights are sharded."""
        return self.layout.count(SPREAD)

    @property
    def shard(self) -> int:
        """The number of this rank's shard of every weight."""
        return self.layout.number(self.rank, SPREAD)

    @property
    def expert(self) -> int:
        return self.size_of("expert")

    @property
    def context(self) -> int:
        return self.size_of("context")

    @property
    def tensor(self) -> int:
        return self.size_of("tensor")

    @property
    def pipeline(self) -> int:
        return self.size_of("pipeline")

    @property
    def stage(self) -> int:
        """This rank's number in its pipeline."""
        return self.place_on("pipeline")

    def of_stage(self, stage: int) -> int:
        """Return the rank of another stage of this rank's pipeline."""
        return self.layout.rank_at(self.layout.places(self.rank) | {"pipeline": stage})

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return one of `groups`, or None if this rank would be alone in it."""
        return self.groups.get(name)

    def gather(self, value: T, ahead: bool = False, sampling: bool = False) -> list[T]:
        """Return the values of all ranks, in order, on every rank. `ahead`, `sampling`: use the group of that name."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        group = self.ahead if ahead else self.sampling if sampling else self.host
        dist.all_gather_object(values, value, group=group)
        return values

    def gather_parts(self, value: T, ahead: bool = False) -> list[T]:
        """Return one value of each data rank, in order: that of its first rank."""
        firsts = self.layout.groups(DATA)[0]
        values: list[Any] = self.gather(value if self.rank in firsts else None, ahead)
        return [values[rank] for rank in firsts]

    def share(self, make: Callable[[], T], ahead: bool = False) -> T:
        """Call `make` on rank 0 and broadcast the result. An error is raised on every rank."""
        if self.size == 1:
            return make()
        result: list[Any] = [None, None]  # the result and the error
        if self.first:
            try:
                result[0] = make()
            except Exception as error:
                result[1] = error
        dist.broadcast_object_list(result, src=0, group=self.ahead if ahead else self.host)
        if result[1] is not None:
            raise result[1]
        return result[0]

    @property
    def teams(self) -> list[list[int]]:
        """The ranks of each team. The ranks of a team have slices of the weights, and together all of them."""
        return self.layout.groups(CUT)

    def least_of_team(self, value: int) -> int:
        """Return the minimum of the values of this rank's team."""
        if self.team is None:
            return value
        least = torch.tensor(value)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.team)
        return int(least)

    def sum_over(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor over a group of ranks, in place."""
        group = self.group(name)
        if group is not None:
            dist.all_reduce(value, group=group)
        return value

    def sum_all(self, name: str, values: Sequence[torch.Tensor]) -> None:
        """All-reduce several tensors in place; small ones of the same dtype share a message."""
        if self.group(name) is None:
            return
        for dtype in dict.fromkeys(value.dtype for value in values):
            for bucket in in_buckets((value for value in values if value.dtype == dtype), torch.Tensor.numel):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    self.sum_over(name, bucket[0])
                    progress.made("numbers summed over ranks", bucket[0].numel())
                    continue
                total = self.sum_over(name, torch.cat([value.flatten() for value in bucket]))
                for value, part in zip(bucket, total.split([value.numel() for value in bucket]), strict=True):
                    value.copy_(part.view_as(value))
                progress.made("numbers summed over ranks", total.numel())

    def to_first(self, value: torch.Tensor | None, like: torch.Tensor, stage: int) -> torch.Tensor | None:
        """Send a stage's value to rank 0, which returns it; other ranks return None. `like` has its shape and dtype."""
        holder = self.layout.rank_at({"pipeline": stage})
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


def join(
    layout: RankLayout,
    *,
    device: str,
    stall_timeout: float,
    patience: float | None = None,
    give_up: Callable[[str], None] = lambda reason: None,
) -> Ranks:
    """Connect the ranks that torchrun started, and make their groups. Raise `RankError` if the layout does not fit.
    `patience`: if the ranks are not connected after so many seconds, call `give_up` and end this process."""
    size = world_size()
    layout = layout.over(size)
    if size == 1:
        return ALONE
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise _no_device(local)
        torch.cuda.set_device(local)
    with _connecting(patience or 2 * stall_timeout + 60, give_up):
        if not dist.is_initialized():
            _connect(torch.device("cuda", local) if on_gpu else None, local)
        return _lay_out(layout, "cuda" if on_gpu else "cpu")


def _no_device(local: int) -> NoDeviceError:
    return NoDeviceError(
        f"local rank {local} has no GPU: this process sees {torch.cuda.device_count()}; start as many processes a "
        "machine as it has GPUs (torchrun --nproc-per-node), or set model.device: cpu"
    )


def _connect(device: torch.device | None, local: int) -> None:
    """Make the process group, with a new prefix in the store. The store may still have entries of an earlier group of
    these processes, with addresses that are no longer valid. `device`: this rank's GPU."""
    store, rank, size = next(dist.rendezvous("env://", timeout=_NO_CLOCK))
    store.set_timeout(_NO_CLOCK)
    store = dist.PrefixStore(f"truestep {next(_connections)}", store)
    lacking = _without_gpu(store, device is not None, rank, size)
    if lacking is not None:
        raise _no_device(local) if device is None else RankLostError(f"rank {lacking} has no GPU, and others have")
    backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_NO_CLOCK, device_id=device)


def _without_gpu(store: dist.Store, on_gpu: bool, rank: int, size: int) -> int | None:
    """Return a rank that has no GPU although others have one; None if there is none. Every rank calls this."""
    if on_gpu:
        store.add("with a GPU", 1)
    else:
        store.set("without a GPU", str(rank))
    if store.add("counted", 1) == size:
        store.set("all are counted", "")
    store.wait(["all are counted"])
    return int(store.get("without a GPU")) if 0 < store.add("with a GPU", 0) < size else None


@contextmanager
def _connecting(seconds: float, give_up: Callable[[str], None]) -> Iterator[None]:
    """End the process if the block takes longer than `seconds`. It connects ranks, which may block inside a call before
    the watch begins."""

    def end() -> None:
        reason = f"the {world_size()} ranks were not connected in {seconds:.0f} s"
        print(f"error: rank {os.environ.get('RANK', '0')} ends: {reason}", file=sys.stderr, flush=True)
        give_up(reason)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@cache
def _lay_out(layout: RankLayout, kind: str) -> Ranks:
    """Make the groups of a layout. They are cached, since each costs threads and connections."""
    mesh = _mesh(kind, {name: layout.count(axes) for name, axes in MESH.items()})
    host, ahead, sampling = (dist.new_group(backend="gloo", timeout=_NO_CLOCK) for _ in range(3))
    team: dist.ProcessGroup | None = None
    for members in layout.groups(CUT):
        if len(members) > 1:  # every rank makes the groups of all teams
            made = dist.new_group(members, backend="gloo", timeout=_NO_CLOCK)
            team = made if dist.get_rank() in members else team
    groups, experts = _groups(dist.get_rank(), layout, mesh), None
    if layout.every["expert"] > 1:
        experts = _expert_mesh(layout, kind)
        groups["expert"] = experts.get_group("expert")
    return Ranks(dist.get_rank(), layout, host, ahead, sampling, team, mesh, experts, groups)


def _mesh(kind: str, sizes: Mapping[str, int]) -> DeviceMesh:
    backend: Any = None
    if kind == "cpu":
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _NO_CLOCK
        backend = dict.fromkeys(sizes, ("gloo", options))
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=backend)
    if kind == "cuda":
        for name in sizes:
            distributed_c10d._set_pg_timeout(_NO_CLOCK, mesh.get_group(name))
    return mesh


def _expert_mesh(layout: RankLayout, kind: str) -> DeviceMesh:
    """Make the mesh of the experts' weights: groups of expert ranks, and the ranks that share each rank's experts."""
    many, sizes = layout.every["expert"], layout.by_name
    shards = layout.count(DERIVED["expert"]) // many
    first = {"pipeline": sizes["pipeline"], "replicate": sizes["data_replicate"]}
    return _mesh(kind, first | {"shard": shards, "expert": many})


def _groups(rank: int, layout: RankLayout, mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    named: dict[str, Any] = {name: mesh.get_group(name) for name in MESH}
    # Groups that are not dimensions of the mesh. `ends`: a tied weight is on both the first and the last stage.
    members = {name: layout.groups(axes) for name, axes in GROUPS.items() if name not in MESH}
    pipelines = layout.groups(["pipeline"])
    if len(pipelines[0]) > 1:
        members["ends"] = [[line[0], line[-1]] for line in pipelines]
        members |= dict.fromkeys(wires(len(pipelines[0])), pipelines)
    named |= {name: _own_group(rank, groups) for name, groups in members.items()}
    return {name: group for name, group in named.items() if group is not None and dist.get_world_size(group) > 1}


def _own_group(rank: int, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make all of these groups; all ranks must do this in the same order. Return the group that this rank is in."""
    if len(groups[0]) == 1:
        return None
    own = None
    for members in groups:
        group = dist.new_group(list(members), timeout=_NO_CLOCK)
        if rank in members:
            own = group
    return own


class Clears(Protocol):
    """An object that uses the groups until `clear` is called."""

    def clear(self) -> None: ...


_cleared_at_leave: WeakSet[Clears] = WeakSet()


def clear_at_leave(thing: Clears) -> None:
    """Register an object to be cleared before the groups are destroyed. Only a weak reference to it is kept."""
    _cleared_at_leave.add(thing)


def leave() -> None:
    """Destroy the process groups at the end of the run."""
    for thing in list(_cleared_at_leave):
        thing.clear()
    _lay_out.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
