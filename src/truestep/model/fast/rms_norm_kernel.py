"""Triton kernels for the backward pass of RMS norms.

A kernel reads each row once, writes its gradient, and sums the weight's gradient over the rows of a program.
`sum_kernel` sums over programs.

Dimensions: R rows, K row width, P programs; S tokens, A heads per token, E head size.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from truestep.gpu.operators import on_device

_NARROW = 256  # narrower rows are treated as heads: a program takes several at a time
_HALVES = 512  # elements of each half of its heads that a program loads per iteration


@triton.jit(do_not_specialize=["row_count"])
def _backward_kernel(
    gradient_pointer,  # [R, K]: the output's gradient
    x_pointer,  # [R, K]
    weight_pointer,  # [K]
    result_pointer,  # [R, K]: the input's gradient
    parts_pointer,  # [P, K] float32: each program's partial gradient of the weight
    row_count,
    epsilon,
    offset,  # added to the weight
    WIDTH: tl.constexpr,
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
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
        normed = x * scale
        total += gradient * normed
        gradient *= weight
        found = scale * (gradient - normed * (tl.sum(gradient * normed, 0) / WIDTH))
        tl.store(result_pointer + place, found.to(result_pointer.dtype.element_ty), mask=inside)
    tl.store(parts_pointer + program * WIDTH + columns, total, mask=inside)


@triton.jit
def _halves(pointer, place, first, second, HALF: tl.constexpr):
    """Load both halves of heads, with zeros where masked."""
    one = tl.load(pointer + place, mask=first, other=0.0).to(tl.float32)
    return one, tl.load(pointer + place + HALF, mask=second, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(pointer, place, one, other, first, second, HALF: tl.constexpr):
    kind = pointer.dtype.element_ty
    tl.store(pointer + place, one.to(kind), mask=first)
    tl.store(pointer + place + HALF, other.to(kind), mask=second)


@triton.jit(do_not_specialize=["token_count"])
def _heads_kernel(
    gradient_pointer,  # [S, HEADS, WIDTH]: the output's gradient, after norm and RoPE
    x_pointer,  # [S, HEADS, WIDTH]
    weight_pointer,  # [WIDTH]
    cosine_pointer,  # [S, WIDTH]
    sine_pointer,  # [S, WIDTH]
    result_pointer,  # [S, HEADS, WIDTH]: the input's gradient, with stride STRIDE between tokens
    parts_pointer,  # [P, WIDTH] float32: each program's partial gradient of the weight
    token_count,
    epsilon,
    offset,  # added to the weight
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TURNS: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens per iteration
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,  # half a head, rounded up to a power of 2
):
    """Undo RoPE (if TURNS), which rotates a head's first half with its second half, and compute the norm's gradient."""
    program = tl.program_id(0)
    HALF: tl.constexpr = (WIDTH + 1) // 2
    head = tl.arange(0, HEAD_BLOCK)[None, :, None]
    lane = tl.arange(0, BLOCK)[None, None, :]
    first_lanes, second_lanes = lane < HALF, lane < WIDTH - HALF
    first_weight, second_weight = _halves(weight_pointer, lane, first_lanes, second_lanes, HALF)
    first_total = tl.zeros([TOKENS, HEAD_BLOCK, BLOCK], tl.float32)
    second_total = tl.zeros([TOKENS, HEAD_BLOCK, BLOCK], tl.float32)
    for begin in range(program * TOKENS, token_count, tl.num_programs(0) * TOKENS):
        token = begin + tl.arange(0, TOKENS).to(tl.int64)[:, None, None]
        there = (token < token_count) & (head < HEADS)
        first_there, second_there = there & first_lanes, there & second_lanes
        place = token * (HEADS * WIDTH) + head * WIDTH + lane
        first, second = _halves(gradient_pointer, place, first_there, second_there, HALF)
        first_x, second_x = _halves(x_pointer, place, first_there, second_there, HALF)
        if TURNS:
            # Load the token's angles once per head: sharing them between heads is slower.
            angle = tl.broadcast_to(token * WIDTH + lane, [TOKENS, HEAD_BLOCK, BLOCK])
            cosines = _halves(cosine_pointer, angle, first_there, second_there, HALF)
            sines = _halves(sine_pointer, angle, first_there, second_there, HALF)
            first, second = first * cosines[0] + second * sines[1], second * cosines[1] - first * sines[0]
        scale = tl.rsqrt(tl.sum(first_x * first_x + second_x * second_x, 2)[:, :, None] / WIDTH + epsilon)
        first_x, second_x = first_x * scale, second_x * scale
        first_total += first * first_x
        second_total += second * second_x
        first, second = first * (first_weight + offset), second * (second_weight + offset)
        inner = tl.sum(first * first_x + second * second_x, 2)[:, :, None] / WIDTH
        first = scale * (first - first_x * inner)
        second = scale * (second - second_x * inner)
        place = token * STRIDE + head * WIDTH + lane
        _store_halves(result_pointer, place, first, second, first_there, second_there, HALF)
    column = tl.arange(0, BLOCK)
    sums = tl.sum(tl.sum(first_total, 0), 0), tl.sum(tl.sum(second_total, 0), 0)
    _store_halves(parts_pointer + program * WIDTH, column, sums[0], sums[1], column < HALF, column < WIDTH - HALF, HALF)


@triton.jit
def _lay_kernel(source_pointer, target_pointer, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy contiguous rows to rows with stride STRIDE, one row per program."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    numbers = tl.load(source_pointer + row * WIDTH + column, mask=column < WIDTH)
    tl.store(target_pointer + row * STRIDE + column, numbers, mask=column < WIDTH)


@cache
def _programs(device: torch.device, block: int) -> int:
    if device.type != "cuda":
        return 3
    each = 8 if block <= 1024 else 6 if block <= 2048 else 4 if block <= 4096 else 2
    return each * int(torch.cuda.get_device_properties(device).multi_processor_count)


def warps(block: int) -> int:
    return min(16, max(2, block // 2048))


def backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:  # [..., K], [..., K], [K] -> [..., K], [P, K]
    """Return the input's gradient, and partial gradients of the weight."""
    if x.shape[-1] <= _NARROW:
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        return result, heads_backward_(result.view(-1, 1, x.shape[-1]), gradient, x, weight, None, epsilon, offset)
    gradient, x = gradient.contiguous(), x.contiguous()
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    programs = max(1, min(rows, _programs(x.device, block)))
    result, parts = torch.empty_like(x), x.new_empty(programs, width, dtype=torch.float32)
    with on_device(x.device):
        _backward_kernel[(programs,)](
            gradient, x, weight, result, parts, rows, epsilon, offset,
            WIDTH=width, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return result, parts


def heads_shape(heads: int, width: int) -> tuple[dict[str, int], int]:
    """Return the block sizes and the warps of a program of `_heads_kernel`."""
    block, head_block = triton.next_power_of_2(-(-width // 2)), triton.next_power_of_2(heads)
    tokens = max(1, _HALVES // (head_block * block))
    warps_each = min(8, max(2, tokens * head_block * block // 512))
    return {"TOKENS": tokens, "HEAD_BLOCK": head_block, "BLOCK": block}, warps_each


def heads_backward_(
    result: torch.Tensor,
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    offset: float,
) -> torch.Tensor:  # [S, A, E], [S x A x E], [S x A x E], [E] -> [P, E]
    """Write the gradient of the norm's input to `result`, whose tokens may be strided, and return partial gradients of
    the weight. `turns`: RoPE's cosines and sines, [S x E], if it follows the norm."""
    gradient, x = gradient.contiguous(), x.contiguous()
    tokens, heads, width = result.shape
    cosine, sine = (x, x) if turns is None else (turn.contiguous() for turn in turns)
    shape, warps_each = heads_shape(heads, width)
    programs = max(1, min(triton.cdiv(tokens, shape["TOKENS"]), _programs(x.device, width)))
    parts = x.new_empty(programs, width, dtype=torch.float32)
    with on_device(x.device):
        _heads_kernel[(programs,)](
            gradient, x, weight, cosine, sine, result, parts, tokens, epsilon, offset, HEADS=heads, WIDTH=width,
            STRIDE=result.stride(0), TURNS=turns is not None, num_warps=warps_each, **shape,
        )  # fmt: skip
    return parts


def lay_(target: torch.Tensor, source: torch.Tensor) -> None:  # [S, N], [S, N]
    """Copy rows into a column range of a wider tensor."""
    source, (tokens, width) = source.contiguous(), source.shape
    block = triton.next_power_of_2(width)
    with on_device(source.device):
        _lay_kernel[(tokens,)](
            source, target, WIDTH=width, STRIDE=target.stride(0), BLOCK=block, num_warps=min(8, max(1, block // 256))
        )
