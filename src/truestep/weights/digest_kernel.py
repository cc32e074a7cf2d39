"""Digests and squares of many weights in one kernel (Triton), which reads each number once.

Dimensions: W weights, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from truestep.gpu.operators import on_device
from truestep.types import sent

_BLOCK = 2048  # numbers that a program reads per iteration
_BLOCKS = 32  # iterations of a program
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _digest_kernel(
    table_pointer,  # [W, 5] int64: address and number of elements, then the width, stride and start of its rows.
    #                 A stride of 0: there is one row.
    work_pointer,  # [P, 2] int32: index of a weight, and of a part of it
    sums_pointer,  # [P] int64
    squares_pointer,  # [P] float32
    TYPE: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,  # addresses and numbers of elements are multiples of 16, so that reads take 16 bytes
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0)
    own = table_pointer + 5 * tl.load(work_pointer + 2 * program)
    first = tl.load(work_pointer + 2 * program + 1).to(tl.int64) * (BLOCK * BLOCKS)
    begin = tl.load(own).to(tl.pointer_type(TYPE))
    count, width = tl.load(own + 1), tl.load(own + 2)
    stride, start = tl.load(own + 3), tl.load(own + 4)
    if ALIGNED:
        begin, count = tl.multiple_of(begin, 16), tl.multiple_of(count, 16)
    total = tl.zeros([BLOCK], tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    if stride == 0:  # element i is element `start + i` of the weight, so there is nothing to divide
        plain = tl.zeros([BLOCK], tl.int64)  # sums of bits, and below, of bits times 2 i + 1 within a program
        odd = 2 * tl.arange(0, BLOCK) + 1
        for block in range(BLOCKS):
            place = first + block * BLOCK + tl.arange(0, BLOCK)
            number = tl.load(begin + place, mask=place < count, other=0.0)
            bits = number.to(BITS, bitcast=True).to(tl.int64)
            plain += bits
            total += bits * (odd + 2 * BLOCK * block).to(tl.int64)
            squares += number.to(tl.float32) * number.to(tl.float32)
        total += plain * (2 * (start + first))
    else:
        for block in range(BLOCKS):
            place = first + block * BLOCK + tl.arange(0, BLOCK)
            number = tl.load(begin + place, mask=place < count, other=0.0)
            where = start + place // width * stride + place % width
            total += number.to(BITS, bitcast=True).to(tl.int64) * (2 * where + 1)
            squares += number.to(tl.float32) * number.to(tl.float32)
    tl.store(sums_pointer + program, tl.sum(total, 0))
    tl.store(squares_pointer + program, tl.sum(squares, 0))


@cache
def _work(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:  # [P, 2] int32
    """Divide weights of the given sizes into parts, one for each program."""
    parts = [triton.cdiv(count, _BLOCK * _BLOCKS) for count in counts]
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), parts)
    firsts = np.repeat(np.cumsum([0, *parts[:-1]]), parts)
    work = np.stack([owners, (np.arange(len(owners)) - firsts).astype(np.int32)], 1)
    return sent(torch.from_numpy(work), device)


class Table:
    """Addresses of weights of one dtype, and their rows (`digests.Run`) as width, stride and start."""

    def __init__(self, parts: Sequence[torch.Tensor], rows: Sequence[tuple[int, int, int]]):
        self.addresses = [part.data_ptr() for part in parts]
        self._device, self._dtype = parts[0].device, parts[0].dtype
        lines = [[part.data_ptr(), part.numel(), *row] for part, row in zip(parts, rows, strict=True)]
        self._count = len(lines)
        with on_device(self._device):
            self._table = sent(torch.tensor(lines), self._device)
            self._work = _work(tuple(part.numel() for part in parts), self._device)
        self._aligned = all(address % 16 == 0 and count % 16 == 0 for address, count, *_ in lines)
        self._owners = self._work[:, 0].long()

    def add_up(self) -> tuple[torch.Tensor, torch.Tensor]:  # [W] int64, [W] float64
        """Return each weight's digest and the sum of its squares."""
        programs, device = len(self._work), self._device
        sums, squares = torch.empty(programs, dtype=torch.int64, device=device), torch.empty(programs, device=device)
        with on_device(self._device):
            _digest_kernel[(programs,)](
                self._table, self._work, sums, squares,
                TYPE=_TYPES[self._dtype], BITS=tl.int32 if self._dtype == torch.float32 else tl.int16,
                ALIGNED=self._aligned, BLOCK=_BLOCK, BLOCKS=_BLOCKS, num_warps=8,
            )  # fmt: skip
        digests = torch.zeros(self._count, dtype=torch.int64, device=device).index_add_(0, self._owners, sums)
        norms = torch.zeros(self._count, dtype=torch.float64, device=device)
        return digests, norms.index_add_(0, self._owners, squares.double())
