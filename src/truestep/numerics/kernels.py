"""Products and sums of rows in Triton, with the same order of additions for any number of rows.

All rows of a tile are computed in the same way, and sums are not split among programs. So a row has the same bits in a
batch of one row or of thousands. With few rows, tiles are smaller, to keep the whole device busy. A tile size is used
only if a test on this device found its results bitwise equal to those of the common size.

Dimensions: M rows, N columns, K terms of a sum.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_GROUP = 8  # row tiles that reuse the same tiles of the weight
_MOST_BLOCK = 2048  # most terms of a row that a program adds per iteration
_PART = 8192  # logits per program


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    a_pointer,  # [M, K]
    b_pointer,  # [N, K]
    bias_pointer,  # [N]
    c_pointer,  # [M, N]
    M,
    N,
    K,
    b_row,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    program, columns = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * columns) * GROUP
    together = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    within = program % (GROUP * columns)
    row = (first + within % together) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // together * BLOCK_N + tl.arange(0, BLOCK_N)
    term = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end read the last row or column, and are not stored.
    a_line = a_pointer + tl.minimum(row, M - 1).to(tl.int64)[:, None] * K + term[None, :]
    b_line = b_pointer + tl.minimum(column, N - 1).to(tl.int64)[None, :] * b_row + term[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            a = tl.load(a_line + start)
            b = tl.load(b_line + start)
        else:
            a = tl.load(a_line + start, mask=term[None, :] < K - start, other=0.0)
            b = tl.load(b_line + start, mask=term[:, None] < K - start, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_pointer + tl.minimum(column, N - 1)).to(tl.float32)[None, :]
    place = c_pointer + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, total.to(c_pointer.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _sum_kernel(x_pointer, out_pointer, M, K, divisor, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    line = x_pointer + row.to(tl.int64)[:, None] * K + lane[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        inside = (row < M)[:, None] & (lane[None, :] < K - start)
        total += tl.load(line + start, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_pointer + row, tl.sum(total, axis=1) / divisor, mask=row < M)


@triton.jit
def _part_kernel(z_pointer, highest_pointer, total_pointer, N, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the largest logit of a part of a row, and the sum of exp(z - largest)."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    highest, total = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(number * PART, tl.minimum(number * PART + PART, N), BLOCK):
        z = tl.load(z_pointer + row * N + start + lane, mask=start + lane < N, other=float("-inf"))
        higher = tl.maximum(highest, z)
        seen = higher > float("-inf")  # a lane without values so far would give NaN
        rescaled = tl.where(seen, total * tl.exp(highest - higher), 0.0)
        total = rescaled + tl.where(seen, tl.exp(z - higher), 0.0)
        highest = higher
    top = tl.max(highest, axis=0)
    total = tl.sum(tl.where(highest > float("-inf"), total * tl.exp(highest - top), 0.0), axis=0)
    place = row * tl.num_programs(1) + number
    tl.store(highest_pointer + place, top)
    tl.store(total_pointer + place, total)


@triton.jit(do_not_specialize=["parts"])
def _join_kernel(highest_pointer, total_pointer, out_pointer, parts, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lane < parts
    highest = tl.load(highest_pointer + row * parts + lane, mask=inside, other=float("-inf"))
    total = tl.load(total_pointer + row * parts + lane, mask=inside, other=0.0)
    top = tl.max(highest, axis=0)
    total = tl.sum(tl.where(inside, total * tl.exp(highest - top), 0.0), axis=0)
    tl.store(out_pointer + row, top + tl.log(total))


_WIDE = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}  # tile for float32
_COMMON = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
# Tiles from large to small, each with the smallest number of rows that it is used for.
_TILES: tuple[tuple[int, dict[str, int]], ...] = (
    (2048, {"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}),
    (65, _COMMON),
    (1, {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}),
    (1, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 5}),
    (1, {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 8}),
    (1, {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 6}),
)
_BUSY = 0.7  # least number of programs per multiprocessor; with fewer, a smaller tile is used
_PROBED = (192, 256, 1088)  # rows, columns and terms of the product that tiles are tested with


def _programs(tile: dict[str, int], rows: int, columns: int) -> int:
    return triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_N"])


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def tiles(dtype: torch.dtype, device: torch.device) -> tuple[tuple[int, dict[str, int]], ...]:
    """Return the tiles whose results on this device are bitwise equal to those of the common tile."""
    if dtype == torch.float32:
        return ((1, _WIDE),)
    rows, columns, terms = _PROBED
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(count, terms, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for count in (rows, columns)
    )
    right = _computed(a, b, None, torch.float32, _COMMON)
    return tuple((fewest, tile) for fewest, tile in _TILES if tile is _COMMON or _same(tile, a, b, right))


def _same(tile: dict[str, int], a: torch.Tensor, b: torch.Tensor, right: torch.Tensor) -> bool:
    try:
        return torch.equal(_computed(a, b, None, torch.float32, tile), right)
    except triton.runtime.errors.OutOfResources:  # this GPU has too little shared memory
        return False


def _tile_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Return the largest tile that keeps the device busy."""
    fitting = [tile for fewest, tile in tiles(dtype, device) if rows >= fewest]
    busy = _BUSY * _processors(device)
    smallest = fitting[-1] if fitting else _COMMON
    return next((tile for tile in fitting if _programs(tile, rows, columns) >= busy), smallest)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:  # [M, K], [N, K], [N] -> [M, N]
    """Compute a bᵀ + bias in float32, rounded once at the end, to `dtype` or that of `a`."""
    a = aligned(a)
    if b.stride(1) != 1 or b.data_ptr() % 16:
        b = b.contiguous()
    tile = _tile_for(len(a), len(b), a.dtype, a.device)
    return _computed(a, b, bias, dtype or a.dtype, tile)


def _computed(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tile: dict[str, int]
) -> torch.Tensor:
    (rows, terms), columns = a.shape, b.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    if out.numel():
        _product_kernel[(_programs(tile, rows, columns),)](
            *(a, b, a if bias is None else bias.contiguous(), out, rows, columns, terms, b.stride(0)),
            BIAS=bias is not None,
            EVEN=terms % tile["BLOCK_K"] == 0,
            GROUP=_GROUP,
            **tile,
        )
    return out


def row_sum(x: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:  # [..., K] -> [...]
    """Sum each row in float32, and divide by `divisor`."""
    x = aligned(x)
    terms = x.shape[-1]
    rows = x.numel() // max(1, terms)
    out = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    block = min(_MOST_BLOCK, triton.next_power_of_2(terms))
    together = max(1, 1024 // block)
    _sum_kernel[(triton.cdiv(rows, together),)](x, out, rows, terms, divisor, ROWS=together, BLOCK=block, num_warps=4)
    return out


def logsumexp(z: torch.Tensor) -> torch.Tensor:  # [M, N] float32 -> [M]
    z = aligned(z)
    rows, columns = z.shape
    parts = triton.cdiv(columns, _PART)
    highest, total = (torch.empty(rows, parts, dtype=torch.float32, device=z.device) for _ in range(2))
    out = torch.empty(rows, dtype=torch.float32, device=z.device)
    if rows:
        _part_kernel[(rows, parts)](z, highest, total, columns, PART=_PART, BLOCK=1024, num_warps=4)
        block = max(16, triton.next_power_of_2(parts))
        _join_kernel[(rows,)](highest, total, out, parts, BLOCK=block, num_warps=1)
    return out


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it that is contiguous and aligned to 16 bytes, as the kernels expect."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
