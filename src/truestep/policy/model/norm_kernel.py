"""The backward pass of root-mean-square norms over rows (Triton): one kernel reads a row once, gives its gradient, adds
what else flows to the row, and adds up the weight's gradient over the rows of a program; another adds up programs.

Dimensions: R rows, K numbers of a row, P programs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from truestep.operators import on_device

_COLUMNS = 32  # that a program of the second kernel adds up


@triton.jit(do_not_specialize=["row_count"])
def _backward_kernel(
    gradient_pointer,  # [R, K]: of the normed rows
    x_pointer,  # [R, K]
    weight_pointer,  # [K]
    onto_pointer,  # [R, K]: what is added to the rows' gradient
    result_pointer,  # [R, K]
    parts_pointer,  # [P, K] float32: the weight's gradient, by program
    row_count,
    epsilon,
    offset,  # of the weight
    WIDTH: tl.constexpr,
    ONTO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weight_pointer + columns, mask=inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros([BLOCK], tl.float32)
    stride = tl.full([], WIDTH, tl.int64)
    for row in range(program, row_count, tl.num_programs(0)):
        place = row * stride + columns
        gradient = tl.load(gradient_pointer + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_pointer + place, mask=inside, other=0.0).to(tl.float32)
        if ONTO:
            onto = tl.load(onto_pointer + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
        normed = x * scale
        total += gradient * normed
        gradient *= weight
        found = scale * (gradient - normed * (tl.sum(gradient * normed, 0) / WIDTH))
        if ONTO:
            found += onto
        tl.store(result_pointer + place, found.to(result_pointer.dtype.element_ty), mask=inside)
    tl.store(parts_pointer + program * WIDTH + columns, total, mask=inside)


@triton.jit(do_not_specialize=["part_count", "adds"])
def _sum_kernel(
    parts_pointer,  # [P, K] float32
    sum_pointer,  # [K] float32
    part_count,
    adds,  # 1: to what is there; 0
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


@cache
def _programs(device: torch.device, block: int) -> int:
    if device.type != "cuda":
        return 3
    each = 4 if block <= 4096 else 2
    return each * int(torch.cuda.get_device_properties(device).multi_processor_count)


def warps(block: int) -> int:
    return min(16, max(4, block // 512))


def backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    onto: torch.Tensor | None,
    epsilon: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [..., K], [..., K], [K], [..., K] -> [..., K], [P, K]
    """Give the rows' gradient, and parts of the weight's, which add up to it."""
    gradient, x = gradient.contiguous(), x.contiguous()
    onto = None if onto is None else onto.contiguous()
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    programs = max(1, min(rows, _programs(x.device, block)))
    result, parts = torch.empty_like(x), x.new_empty(programs, width, dtype=torch.float32)
    with on_device(x.device):
        _backward_kernel[(programs,)](
            gradient, x, weight, result if onto is None else onto, result, parts, rows, epsilon, offset,
            WIDTH=width, ONTO=onto is not None, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return result, parts


def add_up(parts: torch.Tensor, total: torch.Tensor, adds: bool) -> None:  # [P, K], [K]
    """Write the sum of parts, or add it to what is there."""
    count, width = parts.shape
    with on_device(parts.device):
        _sum_kernel[(triton.cdiv(width, _COLUMNS),)](
            parts, total, count, int(adds), WIDTH=width, ROWS=64, COLUMNS=_COLUMNS, num_warps=4
        )
