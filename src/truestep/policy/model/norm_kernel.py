"""The backward pass of root-mean-square norms over rows (Triton): one kernel reads a row once, gives its gradient, adds
what else flows to the row, and adds up the weight's gradient over the rows of a program; another adds up programs.

Dimensions: R rows, K numbers of a row, P programs; S tokens, A heads of each, E numbers of a head.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from truestep.operators import on_device

_NARROW = 256  # numbers of a row, of which a program holds several
_NARROW_NUMBERS = 2048  # that it holds
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


@triton.jit(do_not_specialize=["row_count"])
def _heads_kernel(
    gradient_pointer,  # [S, HEADS, WIDTH]: of the normed and turned heads
    x_pointer,  # [S, HEADS, WIDTH]
    weight_pointer,  # [WIDTH]
    cosine_pointer,  # [S, WIDTH]
    sine_pointer,  # [S, WIDTH]
    onto_pointer,  # [S, HEADS, WIDTH]: what is added to the gradient
    result_pointer,  # [S, HEADS, WIDTH], whose tokens lie STRIDE apart
    parts_pointer,  # [P, WIDTH] float32: the weight's gradient, by program
    row_count,  # S x HEADS
    epsilon,
    offset,  # of the weight
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TURNS: tl.constexpr,
    ONTO: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_pointer + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + offset
    HALF: tl.constexpr = WIDTH // 2
    partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
    signs = tl.where(columns < HALF, 1.0, -1.0)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(program * ROWS, row_count, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows < row_count)[:, None] & (columns < WIDTH)[None, :]
        begin = (rows * WIDTH)[:, None]
        gradient = tl.load(gradient_pointer + begin + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_pointer + begin + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if TURNS:
            partner = tl.load(gradient_pointer + begin + partners[None, :], mask=inside, other=0.0).to(tl.float32)
            token = (rows // HEADS * WIDTH)[:, None]
            cosine = tl.load(cosine_pointer + token + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            sine = tl.load(sine_pointer + token + partners[None, :], mask=inside, other=0.0).to(tl.float32)
            gradient = gradient * cosine + signs[None, :] * partner * sine
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + epsilon)[:, None]
        normed = x * scale
        total += gradient * normed
        gradient *= weight[None, :]
        found = scale * (gradient - normed * (tl.sum(gradient * normed, 1) / WIDTH)[:, None])
        if ONTO:
            found += tl.load(onto_pointer + begin + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        place = (rows // HEADS * STRIDE + rows % HEADS * WIDTH)[:, None] + columns[None, :]
        tl.store(result_pointer + place, found.to(result_pointer.dtype.element_ty), mask=inside)
    tl.store(parts_pointer + program * WIDTH + columns, tl.sum(total, 0), mask=columns < WIDTH)


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
    if x.shape[-1] <= _NARROW:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        return result, heads_backward_(
            result.view(-1, 1, x.shape[-1]), gradient, x, weight, None, epsilon, offset, onto
        )
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


def heads_backward_(
    result: torch.Tensor,
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    offset: float,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:  # [S, A, E], [S x A x E], [S x A x E], [E], .., [S x A x E] -> [P, E]
    """Write the gradient of normed heads, whose tokens may lie apart, and give parts of the weight's. `turns`: cosines
    and sines, [S x E], by which the heads were turned after the norm. `onto`: what else flows to the heads."""
    gradient, x = gradient.contiguous(), x.contiguous()
    tokens, heads, width = result.shape
    cosine, sine = (x, x) if turns is None else (turn.contiguous() for turn in turns)
    block = triton.next_power_of_2(width)
    rows = max(1, _NARROW_NUMBERS // block)
    programs = max(1, min(triton.cdiv(tokens * heads, rows), _programs(x.device, block)))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    with on_device(x.device):
        _heads_kernel[(programs,)](
            gradient, x, weight, cosine, sine, x if onto is None else onto.contiguous(), result, parts, tokens * heads,
            epsilon, offset, HEADS=heads, WIDTH=width, STRIDE=result.stride(0), TURNS=turns is not None,
            ONTO=onto is not None, ROWS=rows, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return parts


def add_up(parts: torch.Tensor, total: torch.Tensor, adds: bool) -> None:  # [P, K], [K]
    """Write the sum of parts, or add it to what is there."""
    count, width = parts.shape
    with on_device(parts.device):
        _sum_kernel[(triton.cdiv(width, _COLUMNS),)](
            parts, total, count, int(adds), WIDTH=width, ROWS=64, COLUMNS=_COLUMNS, num_warps=4
        )
