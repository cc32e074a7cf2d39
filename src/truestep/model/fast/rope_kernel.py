"""A Triton kernel for the norm and RoPE of a token's queries and keys.

Dimensions: T tokens, N width of a token's row, A heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from truestep.gpu.operators import on_device


@triton.jit
def _norm_rope_kernel(
    rows_pointer,  # [T, N]: a row begins with its heads
    first_pointer,  # [E] the norm's weight of the first FIRST heads
    second_pointer,  # [E] the norm's weight of the other heads
    cosine_pointer,  # [T, E]
    sine_pointer,  # [T, E]
    result_pointer,  # [T, HEADS, E]
    row_stride,
    first_epsilon,
    second_epsilon,
    offset,  # added to the weights
    FIRST: tl.constexpr,  # heads of the first kind (queries)
    HEADS: tl.constexpr,  # all heads
    SIZE: tl.constexpr,
    NORMS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,  # half a head, rounded up to a power of 2
):
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SIZE // 2
    head, lane = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    there = (head < HEADS) & (lane < HALF)
    place = rows_pointer + token * row_stride + head * SIZE + lane
    left = tl.load(place, mask=there, other=0.0).to(tl.float32)
    right = tl.load(place + HALF, mask=there, other=0.0).to(tl.float32)
    angle = token * SIZE + tl.broadcast_to(lane, [HEAD_BLOCK, BLOCK])
    left_cosine = tl.load(cosine_pointer + angle, mask=there, other=0.0).to(tl.float32)
    right_cosine = tl.load(cosine_pointer + angle + HALF, mask=there, other=0.0).to(tl.float32)
    left_sine = tl.load(sine_pointer + angle, mask=there, other=0.0).to(tl.float32)
    right_sine = tl.load(sine_pointer + angle + HALF, mask=there, other=0.0).to(tl.float32)
    if NORMS:
        is_first = head < FIRST
        weight = tl.where(is_first, first_pointer, second_pointer) + lane
        left_weight = tl.load(weight, mask=there, other=0.0).to(tl.float32) + offset
        right_weight = tl.load(weight + HALF, mask=there, other=0.0).to(tl.float32) + offset
        mean = tl.sum(left * left + right * right, 1)[:, None] / SIZE
        scale = tl.rsqrt(mean + tl.where(is_first, first_epsilon, second_epsilon))
        left *= scale * left_weight
        right *= scale * right_weight
    place = result_pointer + (token * HEADS + head) * SIZE + lane
    kind = result_pointer.dtype.element_ty
    tl.store(place, (left * left_cosine - right * left_sine).to(kind), mask=there)
    tl.store(place + HALF, (right * right_cosine + left * right_sine).to(kind), mask=there)


def shape_for(heads: int, size: int) -> tuple[dict[str, int], int]:
    """Return a program's block sizes, and the number of programs per token."""
    block = triton.next_power_of_2(size // 2)
    head_block = min(triton.next_power_of_2(heads), max(1, 1024 // block))
    return {"HEAD_BLOCK": head_block, "BLOCK": block}, -(-heads // head_block)


def norm_rope(
    rows: torch.Tensor,  # [T, N]
    heads: Sequence[int],
    weights: Sequence[torch.Tensor],
    epsilons: Sequence[float],
    offset: float,
    cosine: torch.Tensor,  # [T, E]
    sine: torch.Tensor,
) -> torch.Tensor:  # [T, A, E]
    cosine, sine = cosine.contiguous(), sine.contiguous()
    count, size = cosine.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    first, second = (weights[0], weights[-1]) if weights else (cosine, cosine)
    result = rows.new_empty(count, sum(heads), size)
    shape, programs = shape_for(sum(heads), size)
    with on_device(rows.device):
        _norm_rope_kernel[(count, programs)](
            rows, first, second, cosine, sine, result, rows.stride(0), *(epsilons or (0.0,))[:1],
            *(epsilons or (0.0,))[-1:], offset, FIRST=heads[0], HEADS=sum(heads), SIZE=size, NORMS=bool(weights),
            num_warps=4, **shape,
        )  # fmt: skip
    return result
