"""AdamW with 8-bit moments in one pass over a matrix (Triton): reads moments, updates the weight and writes moments,
block by block. The formulas are the same as in `eight_bits`.

Dimensions: R rows, C columns, B blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from truestep.weights.blocks import ScaleBlocks

_TILE = 2048  # elements per program, approximately
_LOG10_2 = tl.constexpr(0.30102999566398120)
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _read(codes_pointer, largest_pointer, levels_pointer, place, largest, inside, there):
    """Load and dequantise a moment [BLOCKS, SIZE]."""
    code = tl.load(codes_pointer + place, mask=inside, other=0).to(tl.int32)
    level = tl.load(levels_pointer + tl.abs(code))
    scale = tl.load(largest_pointer + largest, mask=there, other=0.0)
    return tl.where(code < 0, -level, level) * scale[:, None]


@triton.jit
def _write(
    values, codes_pointer, largest_pointer, levels_pointer, place, largest, inside, there, turn, steps,
    COUNT: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Quantise a moment relative to the largest number of each block, and store it. Unsigned: nonzero values never
    become 0."""
    scale = tl.max(tl.abs(values), axis=1)
    share = tl.abs(values) / tl.maximum(scale, _TINY)[:, None]
    level = tl.floor(tl.log2(share) * _LOG10_2 * steps) + COUNT
    below = tl.minimum(tl.maximum(level, 0.0), COUNT - 1.0).to(tl.int32)
    low = tl.load(levels_pointer + below)
    high = tl.load(levels_pointer + below + 1)
    code = below + (turn < (share - low) / (high - low)).to(tl.int32)
    if SIGNED:
        code = tl.where(values < 0, -code, tl.where(values > 0, code, 0))
        tl.store(codes_pointer + place, code.to(tl.int8), mask=inside)
    else:
        code = tl.where(share == 0, 0, tl.maximum(code, 1))
        tl.store(codes_pointer + place, code.to(tl.uint8), mask=inside)
    tl.store(largest_pointer + largest, scale, mask=there)


@triton.jit
def _turns(along_rows, along_columns):
    return ((along_rows + along_columns) >> 8).to(tl.float32) * 5.9604644775390625e-08 + 0.5


@triton.jit
def _places(
    columns, blocks_of_row, part, blocks_of_part, size, tiles, BLOCKS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return the rows, columns, offsets and masks of this program's elements [BLOCKS, SIZE]: some blocks of one row."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    block = (program % tiles).to(tl.int32) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, SIZE)
    within = block % blocks_of_part
    length = tl.minimum(part - within * size, size)
    column = ((block // blocks_of_part) * part + within * size)[:, None] + lane[None, :]
    there = block < blocks_of_row
    inside = there[:, None] & (lane[None, :] < length[:, None])
    return row, column, row * columns + column, row * blocks_of_row + block, inside, there


@triton.jit
def _update_kernel(
    weight_pointer,  # [R, C]
    gradient_pointer,  # [R, C]
    first_pointer,  # [R, C] int8
    first_largest_pointer,  # [R, B]
    root_pointer,  # [R, C] uint8
    root_largest_pointer,  # [R, B]
    first_levels_pointer,
    root_levels_pointer,
    first_rows_pointer,  # [R] int32: the part of the rounding thresholds that depends on row and update
    root_rows_pointer,  # [R]
    columns_pointer,  # [C] int32: the part that depends on the column
    rounded_pointer,  # [R, C] the model's rounded weight, with ROUNDS
    columns,
    blocks_of_row,
    part,
    blocks_of_part,
    size,
    tiles,
    beta1,
    one_less_beta1,
    beta2,
    one_less_beta2,
    scale,
    decay,
    step_size,
    correction,
    epsilon,
    first_steps,
    root_steps,
    ROUNDS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, column, place, largest, inside, there = _places(
        columns, blocks_of_row, part, blocks_of_part, size, tiles, BLOCKS, SIZE
    )
    gradient = tl.load(gradient_pointer + place, mask=inside, other=0.0) * scale
    first = _read(first_pointer, first_largest_pointer, first_levels_pointer, place, largest, inside, there)
    first = first * beta1 + gradient * one_less_beta1
    root = _read(root_pointer, root_largest_pointer, root_levels_pointer, place, largest, inside, there)
    root = tl.sqrt(root * root * beta2 + gradient * gradient * one_less_beta2)

    weight = tl.load(weight_pointer + place, mask=inside, other=0.0)
    # Not weight · (1 - decay): rounding 1 - decay would change a tiny decay in the same way at every update.
    weight = weight - (decay * weight + step_size * (first / (root / correction + epsilon)))
    tl.store(weight_pointer + place, weight, mask=inside)
    if ROUNDS:
        tl.store(rounded_pointer + place, weight.to(rounded_pointer.dtype.element_ty), mask=inside)

    along = tl.load(columns_pointer + column, mask=inside, other=0)
    turn = _turns(tl.load(first_rows_pointer + row), along)
    _write(first, first_pointer, first_largest_pointer, first_levels_pointer, place, largest, inside, there, turn,
           first_steps, FIRST, True)  # fmt: skip
    turn = _turns(tl.load(root_rows_pointer + row), along)
    _write(root, root_pointer, root_largest_pointer, root_levels_pointer, place, largest, inside, there, turn,
           root_steps, SECOND, False)  # fmt: skip


def update_(
    weight: torch.Tensor,  # [R, C]
    gradient: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],  # codes [R, C], and the largest number of each block [R, B]
    root: tuple[torch.Tensor, torch.Tensor],
    blocks: ScaleBlocks,
    levels: tuple[torch.Tensor, torch.Tensor],  # tables of levels for both moments
    # parts of thresholds: for rows of both moments, and for columns
    along: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decades: float,
    betas: tuple[float, float],
    scale: float,  # factor of the gradient
    rounded: torch.Tensor | None,  # [R, C] the model's rounded weight
    decay: float,
    step_size: float,
    correction: float,
    epsilon: float,
) -> None:
    """Update a matrix and its moments in place."""
    rows, columns = weight.shape
    size = triton.next_power_of_2(blocks.size)
    of_row = blocks.of_row(columns)
    together = max(1, min(_TILE // size, triton.next_power_of_2(of_row)))
    tiles = triton.cdiv(of_row, together)
    counts = [len(table) - 1 for table in levels]
    _update_kernel[(rows * tiles,)](
        weight, gradient, *first, *root, *levels, *along, weight if rounded is None else rounded,
        columns, of_row, blocks.part, blocks.blocks, blocks.size, tiles,
        betas[0], 1 - betas[0], betas[1], 1 - betas[1], scale, decay, step_size, correction, epsilon,
        *((count - 1) / decades for count in counts),
        ROUNDS=rounded is not None, FIRST=counts[0], SECOND=counts[1], BLOCKS=together, SIZE=size,
    )  # fmt: skip
