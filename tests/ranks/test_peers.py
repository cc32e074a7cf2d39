"""Exchanges through memory that all ranks read: the GPUs' own kernel, interpreted, over processes that share files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks.cases import on_ranks
from truestep.ranks import exchange, peers
from truestep.ranks.axes import RankLayout
from truestep.ranks.exchange import TokenExchange
from truestep.ranks.group import join
from truestep.ranks.peers import Peers, check

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are not interpreted")

PROGRAMS, PROGRAM_BYTES = 3, 64 * 2**10
CPU = torch.device("cpu")


def share(folder: Path, ranks: int, rank: int) -> Peers:
    """Give what `connect` does, of files that every rank maps."""

    def mapped(name: str, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_file(str(folder / f"{name}{number}"), shared=True, size=size, dtype=dtype)

    memory = [mapped("memory", other, PROGRAMS * 2 * PROGRAM_BYTES, torch.uint8) for other in range(ranks)]
    signals = [mapped("signals", other, PROGRAMS * ranks, torch.int32) for other in range(ranks)]
    buffers, told = (torch.tensor([one.data_ptr() for one in each]) for each in (memory, signals))
    return Peers(rank, buffers, told, torch.zeros(PROGRAMS, dtype=torch.int32), PROGRAM_BYTES, (memory, signals))


def exchange_all(folder: Path, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        ranks = join(RankLayout(tensor=size), device="cpu", stall_timeout=60)
        group = ranks.group("tensor")
        assert group is not None
        patch.setattr(peers, "_SIZES", (7, 8192, 20_001))
        patch.setattr(peers, "connect", lambda *_: share(folder, size, ranks.rank))
        between = TokenExchange(group)
        between.connect(CPU, torch.float16)  # of bfloat16 the interpreter knows the bits alone
        assert between._peers is not None, "its check found all right"

        generator = torch.Generator().manual_seed(ranks.rank)
        part = torch.randn(5, 3, 700, generator=generator)
        plain = exchange.gather_parts(part, group)
        patch.setattr(exchange, "all_gather", None)  # nothing goes by it now
        with between.everywhere():
            assert torch.equal(between.sum(part.transpose(0, 1)), plain.transpose(1, 2).sum(0))
        numbers = (torch.arange(9).view(3, 3) * 2**40).T
        gathered = torch.stack([numbers + other for other in range(size)])
        assert torch.equal(between.gather_parts(numbers + ranks.rank), gathered)
        large = torch.zeros(PROGRAMS * PROGRAM_BYTES // 4 + 1)
        assert between._peers.takes(large[:-1]) and not between._peers.takes(large)
        assert not between._peers.sums(part.double()), "what float32 would round is left to others"


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers_through_shared_memory(size: int, tmp_path: Path) -> None:
    on_ranks(size, exchange_all, tmp_path, size)


def read_own(folder: Path) -> None:
    """The table names this rank's own memory twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        ranks = join(RankLayout(tensor=2), device="cpu", stall_timeout=60)
        group = ranks.group("tensor")
        assert group is not None
        honest = share(folder, 2, ranks.rank)
        wrong = replace(honest, buffers=honest.buffers[ranks.rank].repeat(2))
        assert check(wrong, group, CPU, torch.float32) == "a sum of 7 numbers is wrong"


def test_memory_that_is_not_the_others_is_noticed(tmp_path: Path) -> None:
    on_ranks(2, read_own, tmp_path)


def refuse(_: Path) -> None:
    """The last rank is on another machine; NCCL, here gloo, serves as before."""
    ranks = join(RankLayout(tensor=2), device="cpu", stall_timeout=60)
    group = ranks.group("tensor")
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "machine", lambda: f"machine {ranks.rank}")
        with pytest.raises(peers.NoPeersError, match="on several machines"):
            peers.connect(group, CPU)
        between = TokenExchange(group)
        between.connect(CPU, torch.float32)
    assert between._peers is None
    assert torch.equal(between.gather_parts(torch.tensor([dist.get_rank()])), torch.tensor([[0], [1]]))


def test_ranks_of_several_machines_exchange_as_before(tmp_path: Path) -> None:
    on_ranks(2, refuse, tmp_path)
