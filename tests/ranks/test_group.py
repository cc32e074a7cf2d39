"""Where ranks stand in a layout, and who their fellows are."""

import os
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ranks.cases import on_ranks
from truestep.ranks import launch
from truestep.ranks.axes import RankError, RankLayout
from truestep.ranks.elastic import RankLostError
from truestep.ranks.group import ALONE, NoDeviceError, Ranks, join, leave
from truestep.ranks.launch import run_ranks

SIZES = st.integers(1, 3)


@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_every_rank_has_a_place_of_its_own(pipeline: int, replicas: int, parts: int, context: int, tensor: int) -> None:
    size = pipeline * replicas * parts * context * tensor
    places = product(*(range(many) for many in (pipeline, replicas, parts, context, tensor)))
    for rank, (stage, replica, part, run, cut) in enumerate(places):
        layout = RankLayout(
            pipeline=pipeline, data_replicate=replicas, data_shard=parts, context=context, tensor=tensor
        )
        ranks = Ranks(rank, layout.over(size))
        assert (ranks.stage, ranks.place_on("context"), ranks.place_on("tensor")) == (stage, run, cut)
        assert ranks.shard == part * context + run
        assert ranks.data_rank == replica * parts + part
        assert (ranks.size_of("data_replicate"), ranks.data) == (replicas, replicas * parts)


def test_one_process_is_every_place_at_once() -> None:
    assert (ALONE.data, ALONE.data_rank, ALONE.size_of("data_replicate"), ALONE.stage, ALONE.first) == (
        1,
        0,
        1,
        0,
        True,
    )
    assert ALONE.group("shard") is None
    assert ALONE.sum_over("tensor", torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("layout", "size", "shards"),
    [
        (RankLayout(), 4, 4),
        (RankLayout(context=2), 4, 4),
        (RankLayout(data_shard=1, context=4), 4, 4),
        (RankLayout(tensor=2, pipeline=2), 4, 1),
        (RankLayout(data_replicate=2, context=2, tensor=2), 8, 2),
    ],
)
def test_weights_are_spread_over_data_and_context_ranks(layout: RankLayout, size: int, shards: int) -> None:
    assert Ranks(0, layout.over(size)).shards == shards


@pytest.mark.parametrize(
    ("layout", "size", "message"),
    [
        (RankLayout(context=3), 4, "parallel.context: 3 does not divide the 4 ranks"),
        (
            RankLayout(tensor=2, pipeline=3),
            4,
            "parallel.tensor: 2 x parallel.pipeline: 3 make a multiple of 6, which does",
        ),
        (RankLayout(data_shard=2, tensor=2), 8, "parallel.data_shard: 2 x parallel.tensor: 2 need 4 ranks, and"),
        (RankLayout(data_shard=2), 1, "data_shard: 2 needs 2 ranks, and this run has 1: start 2 with torchrun"),
        (RankLayout(data_shard=1), 2, "parallel.data_shard: 1 needs 1 rank, and this run has 2"),
    ],
)
def test_a_layout_that_does_not_make_up_the_ranks_is_refused(layout: RankLayout, size: int, message: str) -> None:
    with pytest.raises(RankError, match=message):
        layout.over(size)


@pytest.mark.parametrize(
    ("layout", "fellows"),
    [
        (RankLayout(context=2, tensor=2), {0: {"shard": [0, 2], "context": [0, 2], "tensor": [0, 1]}}),
        (RankLayout(context=2), {0: {"shard": [0, 1, 2, 3], "context": [0, 1]}, 3: {"context": [2, 3]}}),
        (RankLayout(pipeline=4), {1: {"pipeline": [0, 1, 2, 3], "ends": None}, 3: {"ends": [0, 3]}}),
        (RankLayout(data_replicate=2, pipeline=2), {3: {"replicate": [2, 3], "ends": [1, 3], "shard": None}}),
    ],
)
def test_fellows_are_those_of_one_dimension(
    layout: RankLayout, fellows: dict[int, dict[str, list[int] | None]]
) -> None:
    on_ranks(4, _check_fellows, layout, fellows)


def _check_fellows(layout: RankLayout, fellows: dict[int, dict[str, list[int] | None]]) -> None:
    ranks = join(layout, device="cpu", stall_timeout=30)
    for dimension, expected in fellows.get(ranks.rank, {}).items():
        group = ranks.group(dimension)
        assert (None if group is None else dist.get_process_group_ranks(group)) == expected, dimension
    for holder in range(ranks.pipeline):
        mine = torch.full((3,), float(ranks.rank)) if ranks.stage == holder else None
        found = ranks.to_first(mine, torch.empty(3, device="meta"), holder)
        expected = [float(holder * ranks.size // ranks.pipeline)] * 3 if ranks.first else None
        assert (None if found is None else found.tolist()) == expected
    leave()


def test_ranks_that_left_their_groups_connect_again() -> None:
    run_ranks(2, _join_and_leave, timeout=60)


def _join_and_leave() -> None:
    for number in range(10):
        ranks = join(RankLayout(), device="cpu", stall_timeout=0)
        time.sleep(0.002 * ranks.rank * number)
        assert ranks.gather(number) == [number] * 2
        leave()


@pytest.mark.parametrize(
    ("device", "lacking"), [("cuda", [0, 1]), ("cuda", [1]), ("auto", [0]), ("auto", [1]), ("auto", [0, 1])]
)
def test_a_rank_without_a_gpu_does_not_compute_on_the_cpu(device: str, lacking: list[int]) -> None:
    """As where an agent's GPU is missing, which then sees none. With `auto` all ranks may be without."""
    run_ranks(2, _join_where_some_have_gpus, (device, lacking), timeout=60)


def _join_where_some_have_gpus(device: str, lacking: list[int]) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.is_available = lambda: rank not in lacking  # type: ignore[method-assign]
    torch.cuda.device_count = lambda: 0 if rank in lacking else 2  # type: ignore[method-assign, assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[method-assign, assignment]
    if device == "auto" and len(lacking) == 2:
        join(RankLayout(), device=device, stall_timeout=30)
        assert dist.get_backend() == "gloo"
        leave()
    elif rank in lacking:
        with pytest.raises(NoDeviceError, match=f"local rank {rank} has no GPU: this process sees 0"):
            join(RankLayout(), device=device, stall_timeout=30)
    elif device == "auto":  # else the other one ends before they meet
        with pytest.raises(RankLostError, match=f"rank {lacking[0]} has no GPU, and others have"):
            join(RankLayout(), device=device, stall_timeout=30)


def test_folders_of_processes_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = [f"truestep-ranks-{child.pid}-abc", f"truestep-ranks-{os.getpid()}-abc", "truestep-ranks-of-another"]
    for name in names:
        (tmp_path / name).mkdir()
    launch._remove_leftovers()
    assert [(tmp_path / name).exists() for name in names] == [False, True, True]


def test_what_the_first_rank_raises_every_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    def broadcast(result: list[object], src: int, group: object) -> None:
        if result[1] is not None:
            sent[:] = result  # from the first rank
        result[:] = sent

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    for rank in (0, 1):
        with pytest.raises(OSError, match="the disk is full"):
            Ranks(rank, RankLayout(data_shard=2)).share(_full)


def _full() -> None:
    raise OSError("the disk is full")
