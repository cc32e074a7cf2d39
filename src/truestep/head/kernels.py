"""The head's two elementwise passes over logits, fused (Triton), for any loss.

`row_statistics` reads a chunk of raw logits once. `logits_gradient_` reads the chunk again and overwrites it with the
gradient. Both apply scale, temperature and softcap themselves, so the stored logits are the unchanged output of the
matrix product.

Dimensions: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from truestep.types import Coefficients, RowStatistics

# Tuned on an H200. There the first kernel reaches the speed of a copy, and the second 0.95 of it.
_STATISTICS_BLOCK, _STATISTICS_WARPS = 512, 8
_GRADIENT_BLOCK, _GRADIENT_WARPS = 4096, 16
# Rows and columns that a program moves per iteration. A small vocabulary needs fewer columns per program, so that there
# are enough programs.
_FRONT_TILES = ((16, 512), (64, 128))
_FRONT_PROGRAMS = 256

# A chunk may begin at any row, so these pointers may have any alignment. If Triton specialised on alignment, kernels
# would be recompiled in the middle of a run. The gain would be small, because only a few numbers per row are read from
# these pointers.
OF_ROWS = tuple(
    f"{name}_pointer"
    for name in (
        *("label", "multiplier", "logprob", "entropy", "logsumexp", "a", "b", "c"),
        *("logit", "shift", "total", "weighted", "reference", "base", "factor", "scale", "order", "end"),
        *("holds_label", "label_y"),
    )
)


@triton.jit
def _z(raw, multiplier, softcap, CAPPED: tl.constexpr):
    """Compute z = softcap(raw) · multiplier. Its tanh uses exp of negative numbers, which cannot overflow."""
    if CAPPED:
        scaled = raw / softcap
        shrunk = tl.exp(-2 * tl.abs(scaled))
        tanh = (1 - shrunk) / (1 + shrunk)
        raw = tl.where(scaled < 0, -tanh, tanh) * softcap
    return raw * multiplier


@triton.jit
def _load_z(raw_row, start, lanes, vocabulary, multiplier, softcap, CAPPED: tl.constexpr):
    inside = start + lanes < vocabulary
    raw = tl.load(raw_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, _z(raw, multiplier, softcap, CAPPED), float("-inf"))


@triton.jit
def _weigh(z, highest):
    """Compute p = exp(z - highest) and p · (z - highest); both are 0 where z is -inf."""
    distance = tl.where(z == float("-inf"), 0.0, z - highest)
    p = tl.where(z == float("-inf"), 0.0, tl.exp(distance))
    return p, p * distance


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _statistics_kernel(
    raw_pointer,  # [C, V]
    label_pointer,  # [C]
    multiplier_pointer,  # [C] scale / temperature
    logprob_pointer,  # [C]
    entropy_pointer,  # [C]
    logsumexp_pointer,  # [C]
    row_stride,
    vocabulary,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reduce one row. Four blocks at a time share one rescaling, since exponentials limit the speed. Each lane of a
    block has its own running maximum; lanes are joined once, at the end."""
    row = tl.program_id(0).to(tl.int64)
    raw_row = raw_pointer + row * row_stride
    multiplier = tl.load(multiplier_pointer + row)
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # Σ exp(z - largest)
    weighted = tl.zeros((BLOCK,), tl.float32)  # Σ exp(z - largest) · (z - largest)
    for start in range(0, vocabulary, 4 * BLOCK):
        z0 = _load_z(raw_row, start, lanes, vocabulary, multiplier, softcap, CAPPED)
        z1 = _load_z(raw_row, start + BLOCK, lanes, vocabulary, multiplier, softcap, CAPPED)
        z2 = _load_z(raw_row, start + 2 * BLOCK, lanes, vocabulary, multiplier, softcap, CAPPED)
        z3 = _load_z(raw_row, start + 3 * BLOCK, lanes, vocabulary, multiplier, softcap, CAPPED)
        higher = tl.maximum(largest, tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)))
        # In a lane without values so far, the difference would be -inf - -inf, which is NaN.
        shift = tl.where(largest == float("-inf"), 0.0, largest - higher)
        rescale = tl.where(largest == float("-inf"), 0.0, tl.exp(shift))
        p0, weighted0 = _weigh(z0, higher)
        p1, weighted1 = _weigh(z1, higher)
        p2, weighted2 = _weigh(z2, higher)
        p3, weighted3 = _weigh(z3, higher)
        weighted = (weighted + total * shift) * rescale + ((weighted0 + weighted1) + (weighted2 + weighted3))
        total = total * rescale + ((p0 + p1) + (p2 + p3))
        largest = higher
    top = tl.max(largest, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest - top)
    rescale = tl.where(largest == float("-inf"), 0.0, tl.exp(shift))
    normaliser = tl.sum(total * rescale, axis=0)
    mean_distance = tl.sum((weighted + total * shift) * rescale, axis=0) / normaliser
    log_normaliser = tl.log(normaliser)
    label = tl.load(label_pointer + row)
    label_z = _z(tl.load(raw_row + label).to(tl.float32), multiplier, softcap, CAPPED)
    # Subtract the largest logit first: differences of large numbers would lose digits.
    tl.store(logprob_pointer + row, (label_z - top) - log_normaliser)
    tl.store(entropy_pointer + row, log_normaliser - mean_distance)
    tl.store(logsumexp_pointer + row, top + log_normaliser)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _gradient_kernel(
    raw_pointer,  # [C, V]
    high_pointer,  # [C, V] the gradient, in its own type; may share the memory of `raw`
    low_pointer,  # [C, V] the rounding error of `high`, with SPLIT
    label_pointer,  # [C]
    multiplier_pointer,  # [C]
    logsumexp_pointer,  # [C]
    a_pointer,  # [C]
    b_pointer,  # [C]
    c_pointer,  # [C]
    raw_stride,
    high_stride,
    low_stride,
    vocabulary,
    softcap,
    CAPPED: tl.constexpr,
    HAS_B: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one row, block by block in ascending order: no logit is overwritten before its read."""
    row = tl.program_id(0).to(tl.int64)
    raw_row = raw_pointer + row * raw_stride
    high_row = high_pointer + row * high_stride
    multiplier = tl.load(multiplier_pointer + row)
    logsumexp = tl.load(logsumexp_pointer + row)
    a, c = tl.load(a_pointer + row), tl.load(c_pointer + row)
    label = tl.load(label_pointer + row)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        inside = columns < vocabulary
        raw = tl.load(raw_row + columns, mask=inside, other=0.0).to(tl.float32)
        log_p = _z(raw, multiplier, softcap, CAPPED) - logsumexp
        p = tl.exp(log_p)
        if HAS_B:  # noqa: SIM108 (decided when the kernel is compiled)
            gradient = p * (a + tl.load(b_pointer + row) * log_p)
        else:
            gradient = p * a
        gradient = tl.where(columns == label, gradient - c, gradient) * multiplier
        if CAPPED:
            scaled = raw / softcap
            shrunk = tl.exp(-2 * tl.abs(scaled))
            # 1 - tanh², in a form that stays accurate where tanh is near ±1.
            gradient = gradient * 4 * shrunk / ((1 + shrunk) * (1 + shrunk))
        high = gradient.to(high_pointer.dtype.element_ty)
        # Every thread must have read its part of the block before any thread overwrites it.
        tl.debug_barrier()
        tl.store(high_row + columns, high, mask=inside)
        if SPLIT:
            low = (gradient - high.to(tl.float32)).to(low_pointer.dtype.element_ty)
            tl.store(low_pointer + row * low_stride + columns, low, mask=inside)


def row_statistics(
    raw: torch.Tensor, label_ids: torch.Tensor, multiplier: torch.Tensor, softcap: float | None
) -> RowStatistics:  # [C, V], [C], [C]
    rows, vocabulary = raw.shape
    logprobs, entropy, logsumexp = (torch.empty(rows, dtype=torch.float32, device=raw.device) for _ in range(3))
    if rows:
        _statistics_kernel[(rows,)](
            raw,
            label_ids,
            multiplier,
            logprobs,
            entropy,
            logsumexp,
            raw.stride(0),
            vocabulary,
            softcap or 1.0,
            CAPPED=softcap is not None,
            BLOCK=min(_STATISTICS_BLOCK, triton.next_power_of_2(-(-vocabulary // 4))),
            num_warps=_STATISTICS_WARPS,
        )
    return RowStatistics(logprobs, entropy, logsumexp)


def logits_gradient_(
    raw: torch.Tensor,  # [C, V]
    logsumexp: torch.Tensor,  # [C]
    label_ids: torch.Tensor,  # [C]
    multiplier: torch.Tensor,  # [C]
    coefficients: Coefficients,
    softcap: float | None,
    dtype: torch.dtype,
    low: torch.Tensor | None = None,  # [C, V] in `dtype`: receives the rounding error
) -> torch.Tensor:  # [C, V] in `dtype`, over the memory of `raw`
    rows, vocabulary = raw.shape
    # A gradient of a narrower type takes the front of each row's memory.
    high = raw.view(dtype)[:, :vocabulary]
    if rows:
        _gradient_kernel[(rows,)](
            raw,
            high,
            high if low is None else low,
            label_ids,
            multiplier,
            logsumexp,
            coefficients.a,
            coefficients.a if coefficients.b is None else coefficients.b,
            coefficients.c,
            raw.stride(0),
            high.stride(0),
            0 if low is None else low.stride(0),
            vocabulary,
            softcap or 1.0,
            CAPPED=softcap is not None,
            HAS_B=coefficients.b is not None,
            SPLIT=low is not None,
            BLOCK=min(_GRADIENT_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=_GRADIENT_WARPS,
        )
    return high


@triton.jit(do_not_specialize=["row_count"], do_not_specialize_on_alignment=["index_pointer"])
def _to_front_kernel(
    values_pointer,  # [C, V]
    index_pointer,  # [row_count] int64, rising
    row_count,
    row_stride,
    vocabulary,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move some columns of the given rows to the front, a few rows at a time. Each group of rows is read before it is
    written, and its new place is before all rows that are read later."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(0, row_count, ROWS):
        places = first + tl.arange(0, ROWS)
        moved = places < row_count
        inside = moved[:, None] & (columns < vocabulary)[None, :]
        sources = tl.load(index_pointer + places, mask=moved, other=0)
        rows = tl.load(values_pointer + sources[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(values_pointer + places.to(tl.int64)[:, None] * row_stride + columns[None, :], rows, mask=inside)


def to_front_(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:  # [C, V], [K] -> [K, V]
    """Move the given rows, in ascending order, to the front in place. Each is read and written once."""
    vocabulary = values.shape[1]
    rows, columns = _FRONT_TILES[vocabulary < _FRONT_PROGRAMS * _FRONT_TILES[0][1]]
    _to_front_kernel[(triton.cdiv(vocabulary, columns),)](
        values, index, len(index), values.stride(0), vocabulary, ROWS=rows, COLUMNS=columns, num_warps=4
    )
    return values[: len(index)]
