"""Operators on rows that are sorted by expert. An expert's rows are consecutive; `ends` are their end indices.

On a GPU in bfloat16 the products are torch's `grouped_mm`, one kernel for all experts, or our kernel for few rows per
expert. Otherwise (float32, float64, a CPU, widths that are no multiple of 16 bytes) they are a loop over experts, which
needs a host-device sync for `ends` on a GPU. As operators, they let compiled code save their results for the backward
pass, so it never sorts twice.

Dimensions: T tokens, k experts of each, R = T · k rows, E experts, K inputs, N outputs.
"""

import torch

from truestep.gpu.operators import operator
from truestep.weights.gradient_buffers import aligned, entry, runs_of

MOST_ROWS = 32  # rows per expert, on average; above this, torch's grouped GEMM is used
MOST_CHOICES = 8192  # above this, torch sorts the choices


def _sorted_shapes(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = index.new_empty(index.numel())
    return order, torch.empty_like(order), index.new_empty(experts, dtype=torch.int32)


@operator("sorted_by_expert(Tensor index, int experts) -> (Tensor, Tensor, Tensor)", _sorted_shapes)
def sorted_by_expert(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the choices [T, k] by expert. Return the choice of each row, the row of each choice, and the end of each
    expert's rows: [R], [R], [E]."""
    if index.is_cuda and 0 < index.numel() <= MOST_CHOICES:
        from truestep.model.experts.few_rows_kernel import sort_choices  # Triton is imported only on a GPU

        return sort_choices(index, experts)
    chosen, order = index.flatten().int().sort(stable=True)  # a GPU sorts 32-bit keys in half the passes
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    return order, rows, ends_of(chosen, experts)


def ends_of(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the end of each expert's rows, given the experts of choices in ascending order: [R] -> [E] int32."""
    numbers = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    return torch.searchsorted(chosen, numbers, right=True, out_int32=True)


@operator(
    "summed_runs(Tensor rows, Tensor places, Tensor starts) -> Tensor",
    lambda rows, _, starts: rows.new_empty(starts.shape[0], rows.shape[1]),
)
@torch.no_grad()
def summed_runs(rows: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:  # [R, H] -> [T, H]
    """Sum runs of rows in a fixed order, in float32 or wider: run t is `rows[places[starts[t] : starts[t + 1]]]`."""
    if not len(rows) or not len(starts):
        return rows.new_zeros(len(starts), rows.shape[1])
    exact = rows.is_cuda or rows.dtype in (torch.float32, torch.float64)  # a GPU sums in float32 and rounds once
    found = torch.nn.functional.embedding_bag(places, rows if exact else rows.float(), starts, mode="sum")
    return found.to(rows.dtype)


def _product_shape(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, by_rows: bool) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1 if by_rows else 2])


@operator("grouped_product(Tensor rows, Tensor weights, Tensor ends, bool by_rows) -> Tensor", _product_shape)
@torch.no_grad()
def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, by_rows: bool) -> torch.Tensor:
    """Multiply each row by its expert's weight: [R, K] -> [R, N]. `by_rows`: weights are [E, N, K]; else [E, K, N]."""
    rows = rows.contiguous()
    matrices = weights.transpose(1, 2) if by_rows else weights
    if _in_one_kernel(rows, weights):
        if 0 < len(rows) <= MOST_ROWS * len(ends):
            from truestep.model.experts.few_rows_kernel import product_of_few

            return product_of_few(rows, matrices, ends)
        found: torch.Tensor = torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
        return found
    result = _product_shape(rows, weights, ends, by_rows)
    for expert, run in runs_of(ends):
        torch.mm(rows[run], matrices[expert], out=result[run])
    return result


def _gradient_shape(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return first.new_empty(ends.shape[0], first.shape[1], second.shape[1])


@operator("grouped_gradient(Tensor first, Tensor second, Tensor ends) -> Tensor", _gradient_shape)
@torch.no_grad()
def grouped_gradient(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sum the outer products of each expert's rows: [R, N], [R, K] -> [E, N, K]."""
    first, second = first.contiguous(), second.contiguous()
    if _in_one_kernel(first, second):
        found: torch.Tensor = torch.nn.functional.grouped_mm(first.T, second, offs=ends)
        return found
    result = _gradient_shape(first, second, ends).zero_()
    for expert, run in runs_of(ends):
        torch.mm(first[run].T, second[run], out=result[expert])
    return result


@operator(
    "grouped_backward(Tensor gradient, Tensor rows, Tensor weights, Tensor ends, bool by_rows, Tensor number, int call)"
    " -> Tensor",
    lambda gradient, rows, *_: rows.new_empty(rows.shape),
)
@torch.no_grad()
def grouped_backward(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    by_rows: bool,
    number: torch.Tensor,
    call: int,
) -> torch.Tensor:
    """Return the gradient of a product's rows. Add the weights' gradient to the float32 buffer of the weight with this
    number. (The compiler would remove an operator that returns nothing.)"""
    owner, parameter = entry(int(number))
    gradient, rows = gradient.contiguous(), rows.contiguous()
    owner.add_grouped(parameter, *((gradient, rows) if by_rows else (rows, gradient)), ends)
    return grouped_product(gradient, weights, ends, not by_rows)


def _in_one_kernel(*operands: torch.Tensor) -> bool:
    """Tell whether torch's grouped GEMM supports these operands."""
    return aligned(*operands) and all(operand.is_cuda and operand.dtype == torch.bfloat16 for operand in operands)


@operator("top_experts(Tensor scores, int chosen) -> Tensor", lambda scores, chosen: _chosen_shape(scores, chosen))
@torch.no_grad()
def top_experts(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return the experts with each token's highest scores, in descending order: [T, E] -> [T, k]. On a GPU this is one
    kernel, and of equal scores the lower expert is first; torch needs two kernels."""
    if scores.is_cuda and scores.dtype in (torch.float32, torch.bfloat16) and 0 < len(scores) <= MOST_CHOICES:
        from truestep.model.experts.few_rows_kernel import top_scores

        return top_scores(scores, chosen)
    return scores.topk(chosen, dim=-1).indices


def _chosen_shape(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    return scores.new_empty(scores.shape[0], chosen, dtype=torch.int64)
