"""A Triton kernel that adds up the copies of tokens in paths (see `paths`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from truestep.gpu.operators import on_device

_BLOCK = 1024  # columns per program


@triton.jit(do_not_specialize=["width"])
def _sum_kernel(
    given_pointer,  # [P, width]
    total_pointer,  # [S, width]
    segment_pointer,  # [S] int32, as the next three
    starts_pointer,
    first_pointer,
    copies_pointer,
    width,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    segment = tl.load(segment_pointer + token)
    behind = token - tl.load(starts_pointer + segment)
    total = tl.zeros([BLOCK], WIDE)
    for index in range(tl.load(first_pointer + segment), tl.load(first_pointer + segment + 1)):
        place = tl.load(copies_pointer + index) + behind
        total += tl.load(given_pointer + place * width + columns, mask=inside, other=0.0).to(WIDE)
    tl.store(total_pointer + token * width + columns, total.to(total_pointer.dtype.element_ty), mask=inside)


def sum_on_gpu(
    gradient: torch.Tensor, segment: torch.Tensor, starts: torch.Tensor, first: torch.Tensor, copies: torch.Tensor
) -> torch.Tensor:  # [P, ...] -> [S, ...]
    """Sum the copies of each token. `segment` is each token's segment, `starts` the first token of each segment, and
    `copies[first[segment]:first[segment + 1]]` the starts of a segment's copies in the paths."""
    gradient = gradient.contiguous()
    total = gradient.new_empty(len(segment), *gradient.shape[1:])
    if total.numel():
        width = total[0].numel()
        block = min(_BLOCK, triton.next_power_of_2(width))
        wide = tl.float64 if gradient.dtype == torch.float64 else tl.float32
        with on_device(gradient.device):
            _sum_kernel[len(segment), triton.cdiv(width, block)](
                gradient, total, segment, starts, first, copies, width, BLOCK=block, WIDE=wide
            )
    return total
