"""The attention of `attention` as one Triton kernel, for prefill, decode and whole documents.

A program computes the queries of some tokens for one key-value head, and loops over pages of keys. Its tile has the
same number of rows for one token as for many, so that each row is computed in the same way. Pages after a row's own
position or before its window do not change the row: they multiply its sums by one and add zero.

A CUDA graph may be used longer than one KV cache, so the kernel reads the addresses of keys and values from memory.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from truestep.numerics.kernels import aligned
from truestep.numerics.queries import Queries

_BLOCK, _WIDE_BLOCK = 64, 16  # rows of a tile = tokens x query heads per key-value head; the second is for float32
_LOG2_E = tl.constexpr(1.4426950408889634)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pool(places_pointer, which: tl.constexpr, TYPE: tl.constexpr):
    address = tl.load(places_pointer + which)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _score(q, k, position, own, scale, softcap, WINDOW: tl.constexpr, CAPPED: tl.constexpr):
    """Compute the scores of a page's keys times log2 e. A key that the query must not attend to gets -inf."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if CAPPED:
        shrunk = tl.exp(-2 * tl.abs(scores / softcap))
        tanh = (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -tanh, tanh) * softcap
    seen = position[None, :] <= own[:, None]
    if WINDOW > 0:
        seen = seen & (position[None, :] > own[:, None] - WINDOW)
    return tl.where(seen, scores * _LOG2_E, float("-inf"))


@triton.jit
def _start(sink_pointer, heads, mine, SINKS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Begin the online softmax of each row. A sink is a score without a value. `mine`: the rows that have a sink
    here."""
    highest, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    if SINKS:
        sink = tl.load(sink_pointer + heads, mask=mine, other=0.0).to(tl.float32)
        highest, total = tl.where(mine, sink * _LOG2_E, highest), tl.where(mine, 1.0, total)
    return tl.zeros((ROWS, LANES), tl.float32), total, highest


@triton.jit
def _update(result, total, highest, scores, v, TYPE: tl.constexpr):
    """Add a page to the running result, sum and maximum of each row (online softmax)."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no key in this row so far
    weights, rescale = tl.exp2(scores - base[:, None]), tl.exp2(highest - base)
    result = result * rescale[:, None] + tl.dot(weights.to(TYPE), v, input_precision="ieee")
    return result, total * rescale + tl.sum(weights, axis=1), higher


@triton.jit(do_not_specialize=["table_row"])
def _attend_kernel(
    places_pointer,  # [2] int64
    query_pointer,  # [T, Q, E]
    output_pointer,  # [T, Q, F]
    tiles_pointer,  # [4, N] int64
    table_pointer,  # [S, P] int64
    sink_pointer,  # [Q]
    table_row,
    key_page,  # strides
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    scale,
    softcap,
    TYPE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,  # most tokens of a tile
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    head, tile, tiles = tl.program_id(1), tiles_pointer + tl.program_id(0), tl.num_programs(0)
    first, count = tl.load(tile), tl.load(tile + tiles).to(tl.int32)
    start, table = tl.load(tile + 2 * tiles).to(tl.int32), table_pointer + tl.load(tile + 3 * tiles) * table_row
    keys, values = _pool(places_pointer, 0, TYPE), _pool(places_pointer, 1, TYPE)
    row, token = tl.arange(0, BLOCK_M), tl.arange(0, PAGE_SIZE)
    key_lane, value_lane = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    live = (row // GROUP < count) & (row < TOKENS * GROUP)
    own = tl.where(live, start + row // GROUP, -1)
    line = (first + row // GROUP) * (HEADS * GROUP) + head * GROUP + row % GROUP
    inside = live[:, None] & (key_lane[None, :] < KEY_SIZE)
    q = tl.load(query_pointer + line[:, None] * KEY_SIZE + key_lane[None, :], mask=inside, other=0.0)
    sinks = head * GROUP + row % GROUP
    result, total, highest = _start(sink_pointer, sinks, row >= 0, SINKS, BLOCK_M, VALUE_BLOCK)
    last = start + count - 1
    begin = start * 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // PAGE_SIZE
    for page in range(begin, last // PAGE_SIZE + 1):
        place, position = tl.load(table + page), page * PAGE_SIZE + token
        written = position <= last  # memory after the last token may hold NaN
        k_line = keys + place * key_page + head * key_head + token[None, :] * key_token + key_lane[:, None]
        k = tl.load(k_line, mask=written[None, :] & (key_lane[:, None] < KEY_SIZE), other=0.0)
        v_line = values + place * value_page + head * value_head + token[:, None] * value_token + value_lane[None, :]
        v = tl.load(v_line, mask=written[:, None] & (value_lane[None, :] < VALUE_SIZE), other=0.0)
        scores = _score(q, k, position, own, scale, softcap, WINDOW, CAPPED)
        result, total, highest = _update(result, total, highest, scores, v, TYPE)
    inside = live[:, None] & (value_lane[None, :] < VALUE_SIZE)
    target = output_pointer + line[:, None] * VALUE_SIZE + value_lane[None, :]
    tl.store(target, (result / tl.where(live, total, 1.0)[:, None]).to(TYPE), mask=inside)


def rows_of_tile(dtype: torch.dtype, group: int) -> int:
    """Return the number of rows of a tile, which is the same for any number of tokens. `group`: query heads per
    key-value head."""
    return max(_WIDE_BLOCK if dtype == torch.float32 else _BLOCK, triton.next_power_of_2(group))


def attend(
    queries: Queries,
    q: torch.Tensor,  # [T, Q, E]
    keys: torch.Tensor,  # [pages, K, tokens of a page, E]
    values: torch.Tensor,  # [pages, K, tokens of a page, F]
    scale: float,
    window: int | None,
    softcap: float | None,
    places: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # [T, Q, F]
    """Attend as `attention.attend` does."""
    if places is None:
        keys, values = (
            pool if pool.stride(3) == 1 and not pool.data_ptr() % 16 else pool.contiguous() for pool in (keys, values)
        )
        places = queries.send(np.array([keys.data_ptr(), values.data_ptr()], dtype=np.int64))
    q = aligned(q)
    (count, heads_of_queries, key_size), (_, heads, page_size, value_size) = q.shape, values.shape
    group = heads_of_queries // heads
    block = rows_of_tile(q.dtype, group)
    tiles = queries.tiles(block // group)
    # Padding between documents is in no tile, and must not be left as NaN.
    make = torch.zeros if queries.rows is None else torch.empty
    output = make(count, heads_of_queries, value_size, dtype=q.dtype, device=q.device)
    _attend_kernel[(tiles.shape[1], heads)](
        *(places, q, output, tiles, queries.table, q if sinks is None else sinks, queries.table.stride(0)),
        *(*keys.stride()[:3], *values.stride()[:3], scale, softcap or 1.0),
        TYPE=_TYPES[q.dtype],
        HEADS=heads,
        GROUP=group,
        TOKENS=block // group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        BLOCK_M=block,
        KEY_BLOCK=max(16, triton.next_power_of_2(key_size)),
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_size)),
        num_warps=4,
        num_stages=2,
    )
    return output
