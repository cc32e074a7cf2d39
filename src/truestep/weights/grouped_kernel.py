"""A Triton kernel that adds the gradients of all experts' weights to a float32 buffer.

One program computes a tile of one expert's matrix. It sums the outer products of the expert's rows in registers, adds
the buffer's tile, and writes the sum once. It reads `ends` on the GPU, so there is no host-device sync.

Dimensions: R rows sorted by expert, E experts, N and K columns of the two operands.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from truestep.gpu.operators import on_device

_TILE = 64, 128, 128  # rows, and columns of the two operands
_WARPS, _STAGES = 4, 3


@triton.jit
def _add(
    first,  # a descriptor of [R, N]
    second,  # a descriptor of [R, K]
    ends_pointer,  # [E]
    buffer_pointer,  # [E, N, K] float32
    N,
    K,
    ADDS: tl.constexpr,  # True: add to the buffer; False: overwrite it
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    tiles, tile, expert = tl.cdiv(K, SECOND), tl.program_id(0), tl.program_id(1)
    n, k = tile // tiles * FIRST, tile % tiles * SECOND
    start = tl.load(ends_pointer + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_pointer + expert)
    whole = start + (end - start) // ROWS * ROWS
    total = tl.zeros((FIRST, SECOND), tl.float32)
    for row in range(start, whole, ROWS):
        total = tl.dot(first.load([row, n]).T, second.load([row, k]), total)
    if whole < end:  # rows after `end` belong to the next expert
        own = (whole + tl.arange(0, ROWS) < end)[:, None]
        rows, others = first.load([whole, n]), second.load([whole, k])
        total = tl.dot(tl.where(own, rows, 0.0).T, tl.where(own, others, 0.0), total)
    n, k = n + tl.arange(0, FIRST), k + tl.arange(0, SECOND)
    place = buffer_pointer + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    if ADDS:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


def add_gradients(
    first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor, buffer: torch.Tensor, adds: bool
) -> None:  # [R, N], [R, K], [E], [E, N, K]
    """Write the sum of each expert's outer products to `buffer`, or add it to `buffer`."""
    experts, n, k = buffer.shape
    rows, of_first, of_second = _TILE
    given = [
        TensorDescriptor.from_tensor(values, [rows, width])
        for values, width in ((first, of_first), (second, of_second))
    ]
    with on_device(buffer.device):
        _add[(triton.cdiv(n, of_first) * triton.cdiv(k, of_second), experts)](
            *given, ends, buffer, n, k, adds, *_TILE, num_warps=_WARPS, num_stages=_STAGES
        )
