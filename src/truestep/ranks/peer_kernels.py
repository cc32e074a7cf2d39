"""All-reduce and all-gather over the GPUs of one machine, in Triton: each GPU reads the others' memory.

Programs with the same id on all ranks work together. Each copies its tiles to memory that all ranks can read, signals
the others, waits for their signals, and reads their tiles. A program waits only for programs with its own id, so it
does not matter how many run at a time.

A program alternates between two halves of its buffer. A call ends on a rank only when all ranks have begun it. So when
a rank begins call n, all ranks have begun call n - 1, and have finished call n - 2: no rank still reads the half that
call n writes.

Dimensions: N numbers of a rank's part, P programs, R ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 8192  # numbers that a program copies at a time
_WARPS = 16


@triton.jit
def _table(pointer, rank, TYPE: tl.constexpr):
    """Read the address of a rank's memory."""
    return tl.multiple_of(tl.load(pointer + rank).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _meet(signals_pointer, call, program, rank, RANKS: tl.constexpr):
    """Signal to the other ranks' programs that this program's tiles are written, and wait for their signals."""
    tl.debug_barrier()  # all threads of the program have written
    for other in tl.static_range(RANKS):
        told = _table(signals_pointer, other, tl.int32) + program * RANKS + rank
        tl.atomic_xchg(told, call + 1, sem="release", scope="sys")
    own = _table(signals_pointer, rank, tl.int32) + program * RANKS
    for other in tl.static_range(RANKS):
        while tl.atomic_add(own + other, 0, sem="acquire", scope="sys") - (call + 1) < 0:
            pass  # `< 0`, since the other rank may be one call ahead
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank"])
def _exchange_kernel(
    part_pointer,  # [N]
    result_pointer,  # [N], or [R, N] with GATHERS
    buffers_pointer,  # [R] int64: the ranks' memory, [P, 2, ROOM] of the part's type
    signals_pointer,  # [R] int64: their signals, [P, R] int32
    calls_pointer,  # [P] int32: how often each program has run on this rank
    size,  # N
    rank,
    TYPE: tl.constexpr,
    GATHERS: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,  # numbers of a program in a half
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    call = tl.load(calls_pointer + program)
    half = (program * 2 + (call & 1)).to(tl.int64) * ROOM
    lanes = tl.arange(0, TILE)
    own = _table(buffers_pointer, rank, TYPE) + half
    for first in range(program * TILE, size, tl.num_programs(0) * TILE):
        inside = first + lanes < size
        tl.store(own + lanes, tl.load(part_pointer + first + lanes, mask=inside), mask=inside)
        own += TILE
    _meet(signals_pointer, call, program, rank, RANKS)
    for first in range(program * TILE, size, tl.num_programs(0) * TILE):
        inside = first + lanes < size
        total = tl.zeros((TILE,), tl.float32)
        for other in tl.static_range(RANKS):
            found = tl.load(_table(buffers_pointer, other, TYPE) + half + lanes, mask=inside)
            if GATHERS:
                tl.store(result_pointer + other * size + first + lanes, found, mask=inside)
            else:
                total += found.to(tl.float32)
        if not GATHERS:
            tl.store(result_pointer + first + lanes, total.to(TYPE), mask=inside)
        half += TILE
    tl.store(calls_pointer + program, call + 1)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int32: tl.int32}


def exchange(
    part: torch.Tensor,  # [N]
    result: torch.Tensor,  # [N]: for the sum of the parts; [R, N]: for all parts
    buffers: torch.Tensor,  # [R] int64
    signals: torch.Tensor,  # [R] int64
    calls: torch.Tensor,  # [P] int32
    rank: int,
    program_bytes: int,  # size of a half of a program's buffer
) -> None:
    """Sum or gather the ranks' parts into `result`. All ranks call this together."""
    size = part.numel()
    programs = min(len(calls), triton.cdiv(size, TILE))
    _exchange_kernel[(programs,)](
        part,
        result,
        buffers,
        signals,
        calls,
        size,
        rank,
        TYPE=_TYPES[part.dtype],
        GATHERS=result.numel() > size,
        RANKS=len(buffers),
        ROOM=program_bytes // part.element_size(),
        TILE=TILE,
        num_warps=_WARPS,
    )
