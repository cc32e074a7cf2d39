"""Small sums and gathers through GPU memory that all GPUs of one machine can read (symmetric memory).

While tensor ranks sample, they exchange a few rows twice a layer. NCCL takes at least 40 µs for that; a kernel that
reads the other GPUs' memory takes only the time of the reads.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from truestep.ranks.processes import machine

PROGRAMS = 128
_PROGRAM_BYTES = 128 * 2**10  # size of a half of a program's buffer
_SIZES = (7, 8192, 300_001)


class NoPeersError(RuntimeError):
    pass


@dataclass(frozen=True)
class Peers:
    """The ranks' shared buffers, as this rank addresses them."""

    rank: int
    buffers: torch.Tensor  # [R] int64: address of each rank's buffer
    signals: torch.Tensor  # [R] int64: address of each rank's signals
    calls: torch.Tensor  # [P] int32: how often each program has run on this rank
    program_bytes: int
    kept: object  # keeps the buffers alive

    def takes(self, part: torch.Tensor) -> bool:
        """Tell whether a tensor fits into the buffers. For a larger one NCCL is fast enough."""
        return part.numel() * part.element_size() <= self.program_bytes * len(self.calls)

    def sums(self, part: torch.Tensor) -> bool:
        """Tell whether `sum` takes a tensor of this size and dtype. It adds in float32, so not float64."""
        return self.takes(part) and part.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' parts in float32 and in the order of the ranks, so that all ranks get the same bits."""
        return self._exchange(part.contiguous(), torch.empty_like(part, memory_format=torch.contiguous_format))

    def gather(self, part: torch.Tensor) -> torch.Tensor:  # [...] -> [R, ...]
        words = part.contiguous().view(-1).view(torch.int32)
        gathered = self._exchange(words, words.new_empty(len(self.buffers), words.numel()))
        return gathered.view(part.dtype).view(-1, *part.shape)

    def _exchange(self, part: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        from truestep.ranks.peer_kernels import exchange

        assert self.takes(part)
        exchange(part, result, self.buffers, self.signals, self.calls, self.rank, self.program_bytes)
        return result


def connect(group: dist.ProcessGroup, place: torch.device) -> Peers:
    """Allocate the shared buffers, on all ranks together. Raise `NoPeersError` on all ranks if they are on several
    machines."""
    machines = _gathered(torch.tensor([zlib.crc32(machine().encode())], device=place), group)
    if bool((machines != machines[0]).any()):
        raise NoPeersError("the ranks are on several machines")
    import torch.distributed._symmetric_memory as symmetric

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    memory = symmetric.empty(PROGRAMS * 2 * _PROGRAM_BYTES, dtype=torch.uint8, device=place)
    signals = symmetric.empty(PROGRAMS * ranks, dtype=torch.int32, device=place)
    signals.zero_()
    shared = [symmetric.rendezvous(tensor, group) for tensor in (memory, signals)]
    buffers, told = (torch.tensor(there.buffer_ptrs, dtype=torch.int64, device=place) for there in shared)
    calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=place)
    _gathered(calls, group)  # a barrier: all ranks' signals are zero before another rank writes to them
    return Peers(rank, buffers, told, calls, _PROGRAM_BYTES, (memory, signals, shared))


def _gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [...] -> [R, ...]
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.stack(parts)


def check(peers: Peers, group: dist.ProcessGroup, place: torch.device, dtype: torch.dtype) -> str | None:
    """Compare sums and gathers with torch.distributed's, on random numbers. Return what is wrong, or None."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    for size in _SIZES * 3:  # so that both halves of the buffer are used for each size
        part = torch.randn(size, generator=generator).to(place, dtype)
        parts = _gathered(part, group)
        expected = parts[0].float()
        for other in parts[1:]:
            expected = expected + other.float()
        if not torch.equal(peers.sum(part), expected.to(dtype)):
            return f"a sum of {size} numbers is wrong"
        numbers = torch.randint(2**62, (size,), generator=generator).to(place)
        if not torch.equal(peers.gather(numbers), _gathered(numbers, group)):
            return f"{size} numbers are gathered wrong"
    return None
