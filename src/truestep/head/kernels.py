"""The head's elementwise passes, fused (Triton). They know no loss.

Over logits: `row_statistics` reads a chunk of raw logits once; `logits_gradient_` reads it once more and writes the
gradient over its memory. Scale, temperature and softcap are applied on the way: logits are stored as the matrix product
gave them.

Beside a product that leaves the softmax's numerators: `label_logits` before it, `join_parts_` after it; for a loss with
an entropy term, `numerators_gradient_`; beside the backward products `scale_and_subtract_label_`, `subtract_labels_`.

Dimensions: C rows of a chunk, H hidden, V vocabulary, N parts of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from truestep.head.numerators import PART, SLACK, Numerators
from truestep.types import Coefficients, RowStatistics

# Tuned on an H200, where they run at the rate of a copy and at 0.95 of it.
_STATISTICS_BLOCK, _STATISTICS_WARPS = 512, 8
_GRADIENT_BLOCK, _GRADIENT_WARPS = 4096, 16
_DOT_BLOCK = 1024
_LABEL_ROWS, _LABEL_BLOCK = 8, 1024
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _z(raw, multiplier, softcap, CAPPED: tl.constexpr):
    """z = softcap(raw) · multiplier. tanh by exp of a negative number, which cannot overflow."""
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
    """exp(z - highest), and the same times z - highest: of -inf, nothing."""
    distance = tl.where(z == float("-inf"), 0.0, z - highest)
    p = tl.where(z == float("-inf"), 0.0, tl.exp(distance))
    return p, p * distance


@triton.jit
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
    """One row, four blocks at a time, which share one rescaling: exponentials are what it would wait for. A running
    maximum for each lane of the block; lanes are joined once, at the end."""
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
        # A lane that has seen nothing yet has -inf - -inf: there is nothing to shift.
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
    # Differences to the largest logit, not the logits themselves: large ones would cancel.
    tl.store(logprob_pointer + row, (label_z - top) - log_normaliser)
    tl.store(entropy_pointer + row, log_normaliser - mean_distance)
    tl.store(logsumexp_pointer + row, top + log_normaliser)


@triton.jit
def _gradient_kernel(
    raw_pointer,  # [C, V]
    high_pointer,  # [C, V] the gradient, in its own type; may be the memory of `raw`
    low_pointer,  # [C, V] what rounding to that type left, with SPLIT
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
    """One row, block by block in ascending order: what is written never lies ahead of what has been read."""
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
            # 1 - tanh², without the cancellation of a saturated tanh.
            gradient = gradient * 4 * shrunk / ((1 + shrunk) * (1 + shrunk))
        high = gradient.to(high_pointer.dtype.element_ty)
        # All of the block has been read by every thread before any of it is overwritten.
        tl.debug_barrier()
        tl.store(high_row + columns, high, mask=inside)
        if SPLIT:
            low = (gradient - high.to(tl.float32)).to(low_pointer.dtype.element_ty)
            tl.store(low_pointer + row * low_stride + columns, low, mask=inside)


@triton.jit
def _label_logits_kernel(
    hidden_pointer,  # [C, H]
    weight_pointer,  # [V, H]
    label_pointer,  # [C]
    logit_pointer,  # [C]
    hidden_stride,
    weight_stride,
    hidden_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(label_pointer + row).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden_size, BLOCK):
        inside = start + lanes < hidden_size
        hidden = tl.load(hidden_pointer + row * hidden_stride + start + lanes, mask=inside, other=0.0)
        weight = tl.load(weight_pointer + label * weight_stride + start + lanes, mask=inside, other=0.0)
        total += hidden.to(tl.float32) * weight.to(tl.float32)
    tl.store(logit_pointer + row, tl.sum(total, axis=0))


@triton.jit
def _join_kernel(
    values_pointer,  # [C, V]
    shift_pointer,  # [C, N]
    total_pointer,  # [C, N]
    weighted_pointer,  # [C, N]
    label_pointer,  # [C]
    reference_pointer,  # [C]
    logprob_pointer,  # [C]
    entropy_pointer,  # [C]
    logsumexp_pointer,  # [C]
    base_pointer,  # [C]
    values_stride,
    vocabulary,
    parts,
    slack,
    KEPT: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, PARTS)
    inside = lanes < parts
    shift = tl.load(shift_pointer + row * parts + lanes, mask=inside, other=0.0)
    top = tl.max(shift, axis=0)
    rescale = tl.exp2(shift - top)
    total = tl.load(total_pointer + row * parts + lanes, mask=inside, other=0.0)
    weighted = tl.load(weighted_pointer + row * parts + lanes, mask=inside, other=0.0)
    normaliser = tl.sum(total * rescale, axis=0)
    mean = tl.sum((weighted + total * (shift - top)) * rescale, axis=0) / normaliser
    log_normaliser = tl.log2(normaliser)
    # Rows of which a part was shifted are few, if there are any: all their numerators become 1 at most.
    target = tl.where(top > 0, top + slack, 0.0)
    base = tl.load(reference_pointer + row) + target
    tl.store(logprob_pointer + row, (tl.load(label_pointer + row) - top - log_normaliser) * _LN_2)
    tl.store(entropy_pointer + row, (log_normaliser - mean) * _LN_2)
    tl.store(logsumexp_pointer + row, (tl.load(reference_pointer + row) + top + log_normaliser) * _LN_2)
    tl.store(base_pointer + row, base)
    if KEPT and top > 0:
        columns = tl.arange(0, COLUMNS)
        for part in range(parts):
            down = tl.exp2(tl.load(shift_pointer + row * parts + part) - target)
            place = values_pointer + row * values_stride + part * COLUMNS + columns
            mask = part * COLUMNS + columns < vocabulary
            value = tl.load(place, mask=mask, other=0.0)
            tl.store(place, (value.to(tl.float32) * down).to(value.dtype), mask=mask)


@triton.jit
def _numerators_gradient_kernel(
    values_pointer,  # [C, V] numerators; then the gradient
    multiplier_pointer,  # [C]
    factor_pointer,  # [C] p = factor · numerator
    a_pointer,  # [C]
    b_pointer,  # [C]
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    multiplier, factor = tl.load(multiplier_pointer + row), tl.load(factor_pointer + row)
    a, b = tl.load(a_pointer + row), tl.load(b_pointer + row)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        inside = columns < vocabulary
        value = tl.load(values_pointer + row * stride + columns, mask=inside, other=0.0)
        p = value.to(tl.float32) * factor
        # What vanished has no part in the entropy either.
        gradient = p * (a + b * tl.log(tl.maximum(p, 1e-37))) * multiplier
        tl.store(values_pointer + row * stride + columns, gradient.to(value.dtype), mask=inside)


@triton.jit
def _scaled_rows_kernel(
    rows_pointer,  # [C, H]
    scale_pointer,  # [C]
    scaled_pointer,  # [C, H]
    rows_stride,
    scaled_stride,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_pointer + row)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, size, BLOCK):
        inside = start + lanes < size
        value = tl.load(rows_pointer + row * rows_stride + start + lanes, mask=inside, other=0.0)
        scaled = (value.to(tl.float32) * scale).to(value.dtype)
        tl.store(scaled_pointer + row * scaled_stride + start + lanes, scaled, mask=inside)


@triton.jit
def _scale_and_subtract_label_kernel(
    product_pointer,  # [C, H] in place
    scale_pointer,  # [C]
    weight_pointer,  # [V, H]
    label_pointer,  # [C]
    c_pointer,  # [C]
    product_stride,
    weight_stride,
    hidden_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scale, c = tl.load(scale_pointer + row), tl.load(c_pointer + row)
    label = tl.load(label_pointer + row).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, hidden_size, BLOCK):
        inside = start + lanes < hidden_size
        place = product_pointer + row * product_stride + start + lanes
        weight = tl.load(weight_pointer + label * weight_stride + start + lanes, mask=inside, other=0.0)
        tl.store(place, tl.load(place, mask=inside, other=0.0) * scale - c * weight.to(tl.float32), mask=inside)


@triton.jit
def _subtract_labels_kernel(
    buffer_pointer,  # [V, H] in place
    hidden_pointer,  # [C, H]
    order_pointer,  # [C] rows by their label, those to be left out last
    label_pointer,  # [C] of these; beyond the vocabulary: to be left out
    end_pointer,  # [C] where the run of rows with the same label ends
    c_pointer,  # [C]
    buffer_stride,
    hidden_stride,
    vocabulary,
    hidden_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A label's rows in their order, by the first of them: a sum of the same terms in the same order every time."""
    first = tl.program_id(0)
    label = tl.load(label_pointer + first).to(tl.int64)
    before = tl.load(label_pointer + first - 1, mask=first > 0, other=-1)
    if (label != before) & (label < vocabulary):
        end = tl.load(end_pointer + first).to(tl.int32)
        lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        columns = lanes < hidden_size
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(first, end, ROWS):
            index = start + tl.arange(0, ROWS)
            rows = tl.load(order_pointer + index, mask=index < end, other=0).to(tl.int64)
            c = tl.load(c_pointer + rows, mask=index < end, other=0.0)
            place = hidden_pointer + rows[:, None] * hidden_stride + lanes[None, :]
            hidden = tl.load(place, mask=(index < end)[:, None] & columns[None, :], other=0.0)
            total += tl.sum(c[:, None] * hidden.to(tl.float32), axis=0)
        place = buffer_pointer + label * buffer_stride + lanes
        tl.store(place, tl.load(place, mask=columns, other=0.0) - total, mask=columns)


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
    low: torch.Tensor | None = None,  # [C, V] in `dtype`: where the part that rounding leaves goes
) -> torch.Tensor:  # [C, V] in `dtype`, over the memory of `raw`
    rows, vocabulary = raw.shape
    # A narrower gradient takes the front of each row's memory.
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


def label_logits(hidden: torch.Tensor, weight: torch.Tensor, label_ids: torch.Tensor) -> torch.Tensor:  # [C]
    """h · W[y] in float32, of no more than the labels."""
    logits = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    if len(hidden):
        block = min(_DOT_BLOCK, triton.next_power_of_2(hidden.shape[1]))
        _label_logits_kernel[(len(hidden),)](
            hidden, weight, label_ids, logits, hidden.stride(0), weight.stride(0), hidden.shape[1], BLOCK=block
        )
    return logits


def join_parts_(
    parts: Numerators, reference: torch.Tensor
) -> tuple[torch.Tensor, RowStatistics]:  # [C] in powers of two
    """What the numerators of each row are relative to, all of them alike from now on, and the rows' statistics."""
    rows, count = parts.total.shape
    logprobs, entropy, logsumexp, base = torch.empty(4, rows, dtype=torch.float32, device=reference.device)
    values = parts.total if parts.values is None else parts.values
    if rows:
        _join_kernel[(rows,)](
            values,
            parts.shift,
            parts.total,
            parts.weighted,
            parts.label,
            reference,
            logprobs,
            entropy,
            logsumexp,
            base,
            values.stride(0),
            values.shape[1],
            count,
            SLACK,
            KEPT=parts.values is not None,
            PARTS=triton.next_power_of_2(count),
            COLUMNS=PART,
        )
    return base, RowStatistics(logprobs, entropy, logsumexp)


def numerators_gradient_(
    values: torch.Tensor,  # [C, V]
    multiplier: torch.Tensor,  # [C]
    factor: torch.Tensor,  # [C]
    coefficients: Coefficients,
) -> None:
    """`p · (a + b · log p)`; the label's part is apart."""
    rows, vocabulary = values.shape
    if rows:
        _numerators_gradient_kernel[(rows,)](
            values,
            multiplier,
            factor,
            coefficients.a,
            coefficients.b,
            values.stride(0),
            vocabulary,
            BLOCK=min(_GRADIENT_BLOCK, triton.next_power_of_2(vocabulary)),
            num_warps=_GRADIENT_WARPS,
        )


def scaled_rows(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # [C, H], [C]
    """Multiplied in float32, in the rows' own type."""
    scaled = torch.empty_like(rows)
    count, size = rows.shape
    if count:
        block = min(_DOT_BLOCK, triton.next_power_of_2(size))
        _scaled_rows_kernel[(count,)](rows, scale, scaled, rows.stride(0), scaled.stride(0), size, BLOCK=block)
    return scaled


def scale_and_subtract_label_(
    product: torch.Tensor,  # [C, H] float32
    scale: torch.Tensor,  # [C]
    weight: torch.Tensor,  # [V, H]
    label_ids: torch.Tensor,  # [C]
    c: torch.Tensor,  # [C]
) -> None:
    """product · scale - c · W[y], of each row."""
    rows, size = product.shape
    if rows:
        block = min(_DOT_BLOCK, triton.next_power_of_2(size))
        _scale_and_subtract_label_kernel[(rows,)](
            product, scale, weight, label_ids, c, product.stride(0), weight.stride(0), size, BLOCK=block
        )


def subtract_labels_(
    buffer: torch.Tensor,  # [V, H] float32
    hidden: torch.Tensor,  # [C, H]
    label_ids: torch.Tensor,  # [C]
    c: torch.Tensor,  # [C]
) -> None:
    """buffer[y] -= c · h, of every row; the same bits every time."""
    rows, (vocabulary, size) = len(hidden), buffer.shape
    if rows:
        labels, order = torch.where(c == 0, vocabulary, label_ids).sort(stable=True)
        ends = torch.searchsorted(labels, labels, right=True)
        block = min(_LABEL_BLOCK, triton.next_power_of_2(size))
        _subtract_labels_kernel[(rows, triton.cdiv(size, block))](
            buffer,
            hidden,
            order,
            labels,
            ends,
            c,
            buffer.stride(0),
            hidden.stride(0),
            vocabulary,
            size,
            ROWS=_LABEL_ROWS,
            BLOCK=block,
        )
