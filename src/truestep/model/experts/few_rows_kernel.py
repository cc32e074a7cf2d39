"""Triton kernels for few rows per expert, as in sampling: the weights of each active expert are read once.

Torch's grouped GEMM has tiles for many rows. With few rows it reads weights at two thirds of the memory bandwidth.

Dimensions: R rows sorted by expert, E experts, K inputs, N outputs.
"""

import torch
import triton
import triton.language as tl

from truestep.gpu.operators import on_device

_COLUMNS, _INNER, _STAGES, _WARPS = 64, 128, 3, 4


@triton.jit
def _product(
    rows_pointer,  # [R, K]
    weights_pointer,  # [E, N, K], read by strides
    ends_pointer,  # [E]
    result_pointer,  # [R, N]
    N,
    K,
    E,
    of_expert,
    of_column,
    of_inner,
    BY_ROW: tl.constexpr,  # one program per row, and only an expert's first row computes; else one program per expert
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    place = tl.program_id(1)
    if BY_ROW:
        numbers = tl.arange(0, EXPERTS)
        ends = tl.load(ends_pointer + numbers, mask=numbers < E, other=2**31 - 1)
        expert = tl.sum((ends <= place).to(tl.int32), 0)
        start = tl.max(tl.where(ends <= place, ends, 0), 0)
        end = tl.load(ends_pointer + expert)
        end = tl.where(start == place, end, start)  # not the expert's first row: another program computes it
    else:
        expert = place
        start = tl.load(ends_pointer + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_pointer + expert)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weights = weights_pointer + expert.to(tl.int64) * of_expert + column[:, None] * of_column
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        own = (row < end)[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for inner in range(0, K, INNER):
            at = inner + tl.arange(0, INNER)[None, :]
            values = tl.load(rows_pointer + row[:, None] * K + at, mask=own & (at < K), other=0.0)
            matrix = tl.load(weights + at * of_inner, mask=(column < N)[:, None] & (at < K), other=0.0)
            total = tl.dot(values, matrix.T, total)
        tl.store(result_pointer + row[:, None] * N + column[None, :], total, mask=own & (column < N)[None, :])


def product_of_few(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its expert's matrix: [R, K], [E, K, N], [E] -> [R, N]."""
    many, inner = rows.shape
    experts, _, columns = matrices.shape
    result = rows.new_empty(many, columns)
    by_row = many < experts
    of_expert, of_inner, of_column = matrices.stride()
    block = 16 if many <= 8 * experts else 32
    with on_device(rows.device):
        _product[(triton.cdiv(columns, _COLUMNS), many if by_row else experts)](
            rows,
            matrices,
            ends,
            result,
            columns,
            inner,
            experts,
            of_expert,
            of_column,
            of_inner,
            by_row,
            triton.next_power_of_2(experts),
            block,
            _COLUMNS,
            _INNER,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return result


@triton.jit
def _sort(index_pointer, order_pointer, places_pointer, ends_pointer, R, CHOICES: tl.constexpr):
    expert = tl.program_id(0)
    choice = tl.arange(0, CHOICES)
    chosen = tl.load(index_pointer + choice, mask=choice < R, other=2**31 - 1).to(tl.int32)
    own = chosen == expert
    before = tl.sum((chosen < expert).to(tl.int32), 0)
    place = before + tl.cumsum(own.to(tl.int32), 0) - 1
    tl.store(order_pointer + place, choice.to(tl.int64), mask=own)
    tl.store(places_pointer + choice, place.to(tl.int64), mask=own)
    tl.store(ends_pointer + expert, before + tl.sum(own.to(tl.int32), 0))


def sort_choices(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort choices as `sorted_by_expert` does. The program of each expert counts the choices of lower experts."""
    many = index.numel()
    order = torch.empty(many, dtype=torch.int64, device=index.device)
    places, ends = torch.empty_like(order), torch.empty(experts, dtype=torch.int32, device=index.device)
    with on_device(index.device):
        _sort[(experts,)](index.contiguous(), order, places, ends, many, triton.next_power_of_2(many))
    return order, places, ends


@triton.jit
def _top(scores_pointer, chosen_pointer, E, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr):
    token, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    scores = tl.load(scores_pointer + token * E + expert, mask=expert < E, other=0.0).to(tl.float32)
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 becomes 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # integers that sort like the scores
    keys = tl.where(expert < E, order * EXPERTS + (EXPERTS - 1 - expert), -(2**62))
    for place in tl.static_range(CHOSEN):
        best = tl.max(keys, 0)
        tl.store(chosen_pointer + token * CHOSEN + place, EXPERTS - 1 - (best & (EXPERTS - 1)))
        keys = tl.where(keys == best, -(2**62), keys)


def top_scores(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return the indices of each row's highest scores. Of equal scores, the lower index is first: [T, E] -> [T, k]."""
    scores = scores.contiguous()
    tokens, experts = scores.shape
    found = torch.empty(tokens, chosen, dtype=torch.int64, device=scores.device)
    with on_device(scores.device):
        _top[(tokens,)](scores, found, experts, chosen, triton.next_power_of_2(experts), num_warps=1)
    return found
