"""The head's matrix product with a fused softmax (Gluon, for Hopper): logits never reach memory.

A tile is 128 rows by 256 columns of the vocabulary. One warp loads the inputs; two groups of four warps multiply 64
rows each. When a group has its logits, it computes y = logit - reference in units of log 2, stores the softmax
numerators 2^y, and sums them for each row of the tile. Meanwhile the other group may still multiply. In a row of a tile
whose largest y exceeds `SLACK`, all y are shifted down so that the largest is `SLACK`: no numerator overflows.

The order of the tiles does not affect the results.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from truestep.head.kernels import OF_ROWS
from truestep.head.numerators import PART, SLACK, Numerators

# Functions whose names differ between Triton 3.6 and later versions.
_all_warps_here = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_fetch_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Tuned on an H200. Shared memory holds three stages of 48 KiB, and 64 KiB of numerators that are being written out.
ROWS = gl.constexpr(64)  # per group of warps
COLUMNS = gl.constexpr(PART)
DEPTH = gl.constexpr(64)
STAGES = gl.constexpr(3)
GROUP = gl.constexpr(16)  # row tiles that reuse the same tiles of the weight
_SLACK = gl.constexpr(SLACK)
NOTHING = gl.constexpr(-1e30)  # logit of a column past the vocabulary: finite, since 0 · inf is NaN


@gluon.jit
def _place(index, row_tiles, vocabulary_tiles):
    """Return the row tile and the vocabulary tile of an index, ordered so that concurrent tiles share inputs."""
    first = index // (GROUP * vocabulary_tiles) * GROUP
    rows = gl.minimum(row_tiles - first, GROUP)
    rest = index - first * vocabulary_tiles
    return first + rest % rows, rest // rows


@gluon.jit
def _fetch(hidden, weight, upper, lower, weights, ready, empty, sizes):
    _, _, row_tiles, vocabulary_tiles, steps = sizes
    count = 0
    for index in range(gl.program_id(0), row_tiles * vocabulary_tiles, gl.num_programs(0)):
        row_tile, vocabulary_tile = _place(index, row_tiles, vocabulary_tiles)
        row = row_tile * 2 * ROWS
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            arrived = ready.index(stage)
            mbarrier.expect(arrived, (2 * ROWS + COLUMNS) * DEPTH * 2)
            depth = step * DEPTH
            _fetch_tile(hidden, [row, depth], arrived, upper.index(stage))
            _fetch_tile(hidden, [row + ROWS, depth], arrived, lower.index(stage))
            _fetch_tile(weight, [vocabulary_tile * COLUMNS, depth], arrived, weights.index(stage))
            count += 1


@gluon.jit
def _larger(left, right):
    return gl.maximum(left, right)


@gluon.jit
def _sum(left, right):
    return left + right


@gluon.jit
def _multiply_and_weigh(group, half, staging, weights, ready, empty, values, given, found, sizes, KEEP: gl.constexpr):
    factor_pointer, reference_pointer, label_pointer, holds_label_pointer = given
    shift_pointer, total_pointer, weighted_pointer, label_y_pointer = found
    row_count, vocabulary, row_tiles, vocabulary_tiles, steps = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    count = 0
    for index in range(gl.program_id(0), row_tiles * vocabulary_tiles, gl.num_programs(0)):
        row_tile, vocabulary_tile = _place(index, row_tiles, vocabulary_tiles)
        row_group = row_tile * 2 + group
        column = vocabulary_tile * COLUMNS
        logits = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
            logits = warpgroup_mma(
                half.index(stage), weights.index(stage).permute((1, 0)), logits, use_acc=step > 0, is_async=True
            )
            logits = warpgroup_mma_wait(1, deps=(logits,))
            # One product is still in flight; the one before it has finished reading its stage.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        logits = warpgroup_mma_wait(0, deps=(logits,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))

        if column + COLUMNS > vocabulary:
            logits = gl.where((columns < vocabulary - column)[None, :], logits, NOTHING)
        rows = row_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        inside = rows < row_count
        factor = gl.load(factor_pointer + rows, mask=inside, other=1.0)
        reference = gl.load(reference_pointer + rows, mask=inside, other=0.0)
        shift = gl.maximum(gl.reduce(logits, 1, _larger) * factor - reference - _SLACK, 0.0)
        y = logits * factor[:, None] - (reference + shift)[:, None]
        # Only few tiles hold the label of one of their rows.
        if gl.load(holds_label_pointer + row_group * vocabulary_tiles + vocabulary_tile) > 0:
            label = gl.load(label_pointer + rows, mask=inside, other=0).to(gl.int32) - column
            label_y = gl.reduce(gl.where(columns[None, :] == label[:, None], y, 0.0), 1, _sum)
            gl.store(label_y_pointer + rows, label_y + shift, mask=inside & (label >= 0) & (label < COLUMNS))
        numerators = gl.exp2(y)
        place = rows * vocabulary_tiles + vocabulary_tile
        gl.store(shift_pointer + place, shift, mask=inside)
        gl.store(total_pointer + place, gl.reduce(numerators, 1, _sum), mask=inside)
        gl.store(weighted_pointer + place, gl.reduce(numerators * y, 1, _sum), mask=inside)
        if KEEP:
            tma.store_wait(0)  # the previous tile has been copied out of the staging buffer
            _all_warps_here()
            staging.store(numerators.to(values.dtype))
            fence_async_shared()
            _all_warps_here()
            _store_tile(values, [row_group * ROWS, column], staging)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_count"], do_not_specialize_on_alignment=OF_ROWS)
def _product_kernel(
    hidden,  # [C, H]
    weight,  # [V, H]
    values,  # [C, V]
    factor_pointer,  # [C] multiplier of a raw logit, including log2 e
    reference_pointer,  # [C]
    label_pointer,  # [C]
    holds_label_pointer,  # [C / ROWS, N] 1 if any of these rows has its label in this tile
    shift_pointer,  # [C, N]
    total_pointer,  # [C, N]
    weighted_pointer,  # [C, N]
    label_y_pointer,  # [C]
    row_count,
    vocabulary,
    hidden_size,
    KEEP: gl.constexpr,
):
    upper = gl.allocate_shared_memory(hidden.dtype, [STAGES, ROWS, DEPTH], hidden.layout)
    lower = gl.allocate_shared_memory(hidden.dtype, [STAGES, ROWS, DEPTH], hidden.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, COLUMNS, DEPTH], weight.layout)
    upper_staging = gl.allocate_shared_memory(values.dtype, [ROWS, COLUMNS], values.layout)
    lower_staging = gl.allocate_shared_memory(values.dtype, [ROWS, COLUMNS], values.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    row_tiles = gl.cdiv(row_count, 2 * ROWS)
    vocabulary_tiles = gl.cdiv(vocabulary, COLUMNS)
    steps = gl.cdiv(hidden_size, DEPTH)
    given = (factor_pointer, reference_pointer, label_pointer, holds_label_pointer)
    found = (shift_pointer, total_pointer, weighted_pointer, label_y_pointer)
    sizes = (row_count, vocabulary, row_tiles, vocabulary_tiles, steps)
    gl.warp_specialize(
        [
            (_multiply_and_weigh, (0, upper, upper_staging, weights, ready, empty, values, given, found, sizes, KEEP)),
            (_multiply_and_weigh, (1, lower, lower_staging, weights, ready, empty, values, given, found, sizes, KEEP)),
            (_fetch, (hidden, weight, upper, lower, weights, ready, empty, sizes)),
        ],
        [4, 1],  # numbers of warps, and of registers per thread in the line below: second group, loading warp
        [232, 32],
    )


def multiply(
    hidden: torch.Tensor,  # [C, H] bfloat16
    weight: torch.Tensor,  # [V, H] bfloat16
    label_ids: torch.Tensor,  # [C]
    factor: torch.Tensor,  # [C] multiplier of a raw logit, including log2 e; positive
    reference: torch.Tensor,  # [C] a number near the row's largest scaled logit
    keep: bool,
) -> Numerators:
    rows, vocabulary, device = len(hidden), len(weight), hidden.device
    tiles, groups = -(-vocabulary // PART), -(-rows // (2 * ROWS.value)) * 2
    shift, total, weighted = (torch.empty(rows, tiles, device=device) for _ in range(3))
    label_y = torch.empty(rows, device=device)
    # Rows fill whole cache lines. Without `keep` one row suffices: the descriptor needs an address, but nothing is
    # written.
    values = torch.empty(rows if keep else 1, -(-vocabulary // 64) * 64, dtype=hidden.dtype, device=device)
    if rows:
        holds_label = torch.zeros(groups, tiles, dtype=torch.uint8, device=device)
        one = torch.ones((), dtype=torch.uint8, device=device)  # a Python number would need a host-device sync
        holds_label[torch.arange(rows, device=device) // ROWS.value, label_ids // PART] = one
        programs = min(torch.cuda.get_device_properties(device).multi_processor_count, groups // 2 * tiles)
        _product_kernel[(programs,)](
            _described(hidden, ROWS.value, DEPTH.value),
            _described(weight, PART, DEPTH.value),
            _described(values[:, :vocabulary], ROWS.value, PART),
            factor,
            reference,
            label_ids,
            holds_label,
            shift,
            total,
            weighted,
            label_y,
            rows,
            vocabulary,
            hidden.shape[1],
            KEEP=keep,
            num_warps=4,
        )
    return Numerators(values[:, :vocabulary] if keep else None, shift, total, weighted, label_y)


def _described(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)
