"""Triton kernels around the product that outputs softmax numerators, for any loss.

`label_logits` runs before the product and `join_parts_` after it. `numerators_gradient_`, the only pass over all
numerators, is needed only for losses with an entropy term. `scaled_rows`, `scale_and_subtract_label_` and
`subtract_labels_` run next to the backward products; they read only rows of hidden states and of the weight.

Dimensions: C rows of a chunk, H hidden, V vocabulary, N parts of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from truestep.head.kernels import OF_ROWS
from truestep.head.numerators import PART, SLACK, Numerators
from truestep.types import Coefficients, RowStatistics

# Tuned on an H200.
_GRADIENT_BLOCK, _GRADIENT_WARPS = 4096, 16
_DOT_BLOCK = 1024
_LABEL_ROWS, _LABEL_BLOCK = 8, 1024
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
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


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
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
    # Few rows have a shifted part. The numerators of such a row are rescaled to one base, so that they are at most 1.
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


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
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
        # A probability that underflowed to 0 adds nothing to the entropy either.
        gradient = p * (a + b * tl.log(tl.maximum(p, 1e-37))) * multiplier
        tl.store(values_pointer + row * stride + columns, gradient.to(value.dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
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


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
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


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _subtract_labels_kernel(
    buffer_pointer,  # [V, H] in place
    hidden_pointer,  # [C, H]
    order_pointer,  # [C] rows sorted by label, skipped rows last
    label_pointer,  # [C] the labels in this order; the vocabulary's size marks a row to skip
    end_pointer,  # [C] the end of the rows with the same label
    c_pointer,  # [C]
    buffer_stride,
    hidden_stride,
    vocabulary,
    hidden_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the rows of each label in a fixed order, in the program of the label's first row, so that results are
    deterministic."""
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


def label_logits(hidden: torch.Tensor, weight: torch.Tensor, label_ids: torch.Tensor) -> torch.Tensor:  # [C]
    """Compute the logit of each row's label, h · W[y], in float32."""
    logits = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    if len(hidden):
        block = min(_DOT_BLOCK, triton.next_power_of_2(hidden.shape[1]))
        _label_logits_kernel[(len(hidden),)](
            hidden, weight, label_ids, logits, hidden.stride(0), weight.stride(0), hidden.shape[1], BLOCK=block
        )
    return logits


def join_parts_(
    parts: Numerators, reference: torch.Tensor
) -> tuple[torch.Tensor, RowStatistics]:  # [C] as logarithms to base 2
    """Rescale the numerators of each row to one base. Return the bases and the rows' statistics."""
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
    """Overwrite the numerators with `p · (a + b · log p)`, the gradient without the label's term."""
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
    """Multiply each row by its scale in float32, and round the result to the dtype of `rows`."""
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
    """Compute product · scale - c · W[y] for each row, in place."""
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
    """Subtract c · h from buffer[y] for every row, deterministically."""
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
