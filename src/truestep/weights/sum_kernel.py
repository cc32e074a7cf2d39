"""A Triton kernel that sums partial gradients [P, K] and writes the sum [K] to a buffer or adds it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from truestep.gpu.operators import on_device

_COLUMNS = 32  # columns per program


@triton.jit(do_not_specialize=["part_count", "adds"])
def _sum_kernel(
    parts_pointer,  # [P, K] float32
    sum_pointer,  # [K] float32
    part_count,
    adds,  # 1: add to the buffer; 0: overwrite it
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, part_count, ROWS):
        rows = first + tl.arange(0, ROWS)
        place = rows[:, None] * WIDTH + columns[None, :]
        total += tl.load(parts_pointer + place, mask=(rows < part_count)[:, None] & inside[None, :], other=0.0)
    found = tl.sum(total, 0) + tl.load(sum_pointer + columns, mask=columns < WIDTH * adds, other=0.0)
    tl.store(sum_pointer + columns, found, mask=inside)


def add_up(parts: torch.Tensor, total: torch.Tensor, adds: bool) -> None:  # [P, K], [K]
    """Write the sum of parts to `total`, or add it to `total`."""
    count, width = parts.shape
    with on_device(parts.device):
        _sum_kernel[(triton.cdiv(width, _COLUMNS),)](
            parts, total, count, int(adds), WIDTH=width, ROWS=64, COLUMNS=_COLUMNS, num_warps=4
        )
