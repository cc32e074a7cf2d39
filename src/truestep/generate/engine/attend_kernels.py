"""Decode attention over the paged KV cache, in Triton: one query token of each row (split-K, as in flash-decoding).

A program handles one key-value head of a row and a span of its keys; the query heads that share the key-value head are
the rows of its tile. A second kernel joins the spans. In this way many programs share a long row. A short row costs
little, because programs beyond its length end at once.

The cache has a new address in each phase of sampling, but a CUDA graph is used in several phases. So kernels read the
address of the cache from memory.

Dimensions: R rows, Q query heads, K key-value heads, G = Q / K, E head size, N spans, P pages of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from truestep.generate.engine.attend import Rows
from truestep.generate.engine.cache import PagedCache

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def pool_of(addresses_pointer, which: tl.constexpr, TYPE: tl.constexpr):
    """Read the address of the layer's keys (0) or values (1)."""
    address = tl.load(addresses_pointer + which)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _store_kernel(
    addresses_pointer,  # [2] int64, of the layer
    key_pointer,  # [R, K, E]
    value_pointer,  # [R, K, E]
    page_pointer,  # [R] int64
    offset_pointer,  # [R] int64
    key_row,  # strides
    key_head,
    value_row,
    value_head,
    meta_row,
    TYPE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    """Write a row's new key and value to its page."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(page_pointer + row * meta_row)
    offset = tl.load(offset_pointer + row * meta_row)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    lane = tl.arange(0, SIZE_BLOCK)[None, :]
    line = (page * HEADS + head) * PAGE_SIZE + offset
    inside = (head < HEADS) & (lane < KEY_SIZE)
    key = tl.load(key_pointer + row * key_row + head * key_head + lane, mask=inside)
    tl.store(pool_of(addresses_pointer, 0, TYPE) + line * KEY_SIZE + lane, key, mask=inside)
    inside = (head < HEADS) & (lane < VALUE_SIZE)
    value = tl.load(value_pointer + row * value_row + head * value_head + lane, mask=inside)
    tl.store(pool_of(addresses_pointer, 1, TYPE) + line * VALUE_SIZE + lane, value, mask=inside)


@triton.jit
def _gather_kernel(
    addresses_pointer,  # [2] int64, of the layer
    key_pointer,  # [Y, K, E]
    value_pointer,  # [Y, K, E]
    page_pointer,  # [Y] int64
    offset_pointer,  # [Y] int64
    TYPE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    """Copy a token's key and value from its page."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    lane = tl.arange(0, SIZE_BLOCK)[None, :]
    line = (tl.load(page_pointer + row) * HEADS + head) * PAGE_SIZE + tl.load(offset_pointer + row)
    ours = row * HEADS + head
    inside = (head < HEADS) & (lane < KEY_SIZE)
    key = tl.load(pool_of(addresses_pointer, 0, TYPE) + line * KEY_SIZE + lane, mask=inside)
    tl.store(key_pointer + ours * KEY_SIZE + lane, key, mask=inside)
    inside = (head < HEADS) & (lane < VALUE_SIZE)
    value = tl.load(pool_of(addresses_pointer, 1, TYPE) + line * VALUE_SIZE + lane, mask=inside)
    tl.store(value_pointer + ours * VALUE_SIZE + lane, value, mask=inside)


@triton.jit
def _first_tile(length, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the index of the first page that a row attends to."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // PAGE_SIZE
    return first


@triton.jit
def _fetch(pool, line, own, lane, SIZE: tl.constexpr):
    """Load a page of one head: [tokens, E], with zeros for tokens beyond the row's length."""
    inside = own[:, None] & (lane[None, :] < SIZE)
    return tl.load(pool + line[:, None] * SIZE + lane[None, :], mask=inside, other=0.0)


@triton.jit
def _fetch_queries(line, seen, lane, SIZE: tl.constexpr):
    """Load the queries of one key-value head: [G, E], with zeros below."""
    inside = seen[:, None] & (lane[None, :] < SIZE)
    return tl.load(line[:, None] + lane[None, :], mask=inside, other=0.0)


@triton.jit
def _start(
    sink_pointer,
    heads,
    member,
    span,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Begin the online softmax of each row. A sink is a score that has no value; it belongs to the row's first span."""
    highest, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    if SINKS:
        mine = member < tl.where(span == 0, GROUP, 0)
        sink = tl.load(sink_pointer + heads, mask=mine, other=0.0).to(tl.float32)
        highest, total = tl.where(mine, sink * _LOG2_E, highest), tl.where(mine, 1.0, total)
    return tl.zeros((ROWS, LANES), tl.float32), total, highest


@triton.jit
def _update(result, total, highest, scores, v, TYPE: tl.constexpr):
    """Update the online softmax with a page."""
    higher = tl.maximum(highest, tl.max(scores, axis=1))  # finite: every page has a key that is not masked
    weights, rescale = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
    result = result * rescale[:, None] + tl.dot(weights.to(TYPE), v, input_precision="ieee")
    return result, total * rescale + tl.sum(weights, axis=1), higher


@triton.jit
def _score(q, k, position, length, scale, softcap, WINDOW: tl.constexpr, CAPPED: tl.constexpr):
    """Compute the scores of a page's keys, in base 2; -inf: masked."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        shrunk = tl.exp(-2 * tl.abs(scores / softcap))
        tanh = (1 - shrunk) / (1 + shrunk)
        scores = tl.where(scores < 0, -tanh, tanh) * softcap
    seen = position < length
    if WINDOW > 0:
        seen = seen & (position >= length - WINDOW)
    return tl.where(seen[None, :], scores * _LOG2_E, float("-inf"))


# `tiles` and `spans` differ from batch to batch: specialising on them would recompile.
@triton.jit(do_not_specialize=["tiles", "spans"])
def _attend_kernel(
    addresses_pointer,  # [2] int64, of the layer
    query_pointer,  # [R, Q, E]
    length_pointer,  # [R] int64
    table_pointer,  # [R, P] int64
    output_pointer,  # [R, Q, E]
    part_pointer,  # [R, Q, N, E] float32: the weighted sum of each span's values
    highest_pointer,  # [R, Q, N] its largest score, in base 2
    total_pointer,  # [R, Q, N] the sum of its weights, relative to the largest score
    sink_pointer,  # [Q]
    query_row,  # strides
    query_head,
    meta_row,
    scale,
    softcap,
    tiles,  # pages of a span
    spans,
    TYPE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    row, head, span = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_pointer + row * meta_row).to(tl.int32)
    first, end = _first_tile(length, WINDOW, PAGE_SIZE), tl.cdiv(length, PAGE_SIZE)
    begin = first + span * tiles
    if begin >= end:
        return
    keys, values = pool_of(addresses_pointer, 0, TYPE), pool_of(addresses_pointer, 1, TYPE)
    member, token = tl.arange(0, GROUP_BLOCK), tl.arange(0, PAGE_SIZE)
    key_lane, value_lane = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    queries, seen = head * GROUP + member, member < GROUP
    q = _fetch_queries(query_pointer + row * query_row + queries * query_head, seen, key_lane, KEY_SIZE)
    result, total, highest = _start(sink_pointer, queries, member, span, SINKS, GROUP, GROUP_BLOCK, VALUE_BLOCK)
    for tile in range(begin, tl.minimum(begin + tiles, end)):
        line = (tl.load(table_pointer + row * meta_row + tile) * HEADS + head) * PAGE_SIZE + token
        position = tile * PAGE_SIZE + token
        k = _fetch(keys, line, position < length, key_lane, KEY_SIZE)
        v = _fetch(values, line, position < length, value_lane, VALUE_SIZE)
        scores = _score(q, k, position, length, scale, softcap, WINDOW, CAPPED)
        result, total, highest = _update(result, total, highest, scores, v, TYPE)
    place = row * (HEADS * GROUP) + queries
    inside = seen[:, None] & (value_lane[None, :] < VALUE_SIZE)
    if end - first <= tiles:  # the row has one span only
        target = output_pointer + place[:, None] * VALUE_SIZE + value_lane[None, :]
        tl.store(target, (result / total[:, None]).to(TYPE), mask=inside)
    else:
        place = place * spans + span
        tl.store(part_pointer + place[:, None] * VALUE_SIZE + value_lane[None, :], result, mask=inside)
        tl.store(highest_pointer + place, highest, mask=seen)
        tl.store(total_pointer + place, total, mask=seen)


@triton.jit(do_not_specialize=["tiles", "spans"])
def _join_kernel(
    length_pointer,  # [R] int64
    output_pointer,  # [R, Q, E]
    part_pointer,  # [R, Q, N, E] float32
    highest_pointer,  # [R, Q, N]
    total_pointer,  # [R, Q, N]
    meta_row,
    tiles,
    spans,
    TYPE: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Join the spans of a query head. A row with one span is finished already."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_pointer + row * meta_row).to(tl.int32)
    own = tl.cdiv(tl.cdiv(length, PAGE_SIZE) - _first_tile(length, WINDOW, PAGE_SIZE), tiles)
    if own <= 1:
        return
    lane = tl.arange(0, VALUE_BLOCK)
    inside = lane < VALUE_SIZE
    place = row * QUERIES + tl.program_id(1)
    top = tl.load(highest_pointer + place * spans)
    total = tl.load(total_pointer + place * spans)
    result = tl.load(part_pointer + place * spans * VALUE_SIZE + lane, mask=inside, other=0.0)
    for span in range(1, own):
        highest = tl.load(highest_pointer + place * spans + span)
        higher = tl.maximum(top, highest)
        ours, theirs = tl.exp2(top - higher), tl.exp2(highest - higher)
        part = tl.load(part_pointer + (place * spans + span) * VALUE_SIZE + lane, mask=inside, other=0.0)
        result = result * ours + part * theirs
        total = total * ours + tl.load(total_pointer + place * spans + span) * theirs
        top = higher
    tl.store(output_pointer + place * VALUE_SIZE + lane, (result / total).to(TYPE), mask=inside)


def span_tokens(programs: int) -> int:
    """Return the number of keys of a program: fewer if there would be too few programs to keep a GPU busy."""
    return 512 if programs >= 1024 else 256 if programs >= 512 else 128


def warps(group_block: int, value_block: int) -> int:
    """Return the warps of a program: few, so that many programs have loads in flight."""
    return 2 if group_block * value_block <= 4096 else 4


def store(
    cache: PagedCache,
    layer: int,
    pages: torch.Tensor,  # [T]
    offsets: torch.Tensor,  # [T]
    k: torch.Tensor,  # [T, K, E]
    v: torch.Tensor,  # [T, K, E]
) -> None:
    """Write keys and values to their pages, as `cache.store` does."""
    assert cache.places is not None and pages.stride() == offsets.stride()
    k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (k, v))
    count, heads, key_size = k.shape
    value_size = v.shape[2]
    _store_kernel[(count,)](
        cache.places[layer],
        k,
        v,
        pages,
        offsets,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        pages.stride(0),
        TYPE=TYPES[k.dtype],
        HEADS=heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        PAGE_SIZE=cache.page_size,
        HEAD_BLOCK=triton.next_power_of_2(heads),
        SIZE_BLOCK=triton.next_power_of_2(max(key_size, value_size)),
    )


def gather(
    cache: PagedCache,
    layer: int,
    pages: torch.Tensor,  # [Y]
    offsets: torch.Tensor,  # [Y]
) -> tuple[torch.Tensor, torch.Tensor]:  # [Y, K, E] each
    """Copy keys and values of tokens from their pages, as `cache.gather` does."""
    assert cache.places is not None and pages.is_contiguous() and offsets.is_contiguous()
    (_, heads, page_size, key_size), value_size = cache.keys[layer].shape, cache.values[layer].shape[3]
    k, v = (cache.keys[layer].new_empty(len(pages), heads, size) for size in (key_size, value_size))
    _gather_kernel[(len(pages),)](
        cache.places[layer],
        k,
        v,
        pages,
        offsets,
        TYPE=TYPES[k.dtype],
        HEADS=heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        PAGE_SIZE=page_size,
        HEAD_BLOCK=triton.next_power_of_2(heads),
        SIZE_BLOCK=triton.next_power_of_2(max(key_size, value_size)),
    )
    return k, v


def attend(
    rows: Rows,
    layer: int,
    q: torch.Tensor,  # [R, Q, E]
    k: torch.Tensor,  # [R, K, E]
    v: torch.Tensor,  # [R, K, E]
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # [R, Q, E]
    """Write the new keys and values, and attend, as `attend.attend_rows` does."""
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    store(rows.cache, layer, rows.pages, rows.offsets, k, v)
    assert rows.cache.places is not None
    assert rows.lengths.stride(0) == rows.table.stride(0) and rows.table.stride(1) == 1
    (count, queries, key_size), (heads, value_size) = q.shape, v.shape[1:]
    page_size, meta_row = rows.cache.page_size, rows.lengths.stride(0)
    tiles = max(1, span_tokens(count * heads) // page_size)
    longest = rows.longest if window is None else min(rows.longest, window + page_size)
    spans = max(1, -(-longest // (tiles * page_size)))
    output = torch.empty(count, queries, value_size, dtype=q.dtype, device=q.device)
    part = torch.empty(count, queries, spans, value_size, dtype=torch.float32, device=q.device)
    highest, total = (torch.empty(count, queries, spans, dtype=torch.float32, device=q.device) for _ in range(2))
    shape = {"TYPE": TYPES[q.dtype], "PAGE_SIZE": page_size, "VALUE_SIZE": value_size}
    shape |= {"WINDOW": window or 0}
    shape["VALUE_BLOCK"] = max(16, triton.next_power_of_2(value_size))
    parts = (output, part, highest, total)
    group_block = max(16, triton.next_power_of_2(queries // heads))
    _attend_kernel[(count, heads, spans)](
        *(rows.cache.places[layer], q, rows.lengths, rows.table),
        *parts,
        output if sinks is None else sinks,
        *(q.stride(0), q.stride(1), meta_row, scale, softcap or 1.0, tiles, spans),
        HEADS=heads,
        GROUP=queries // heads,
        KEY_SIZE=key_size,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        GROUP_BLOCK=group_block,
        KEY_BLOCK=max(16, triton.next_power_of_2(key_size)),
        num_warps=warps(group_block, shape["VALUE_BLOCK"]),
        num_stages=3 if key_size <= 128 and q.dtype != torch.float32 else 2,
        **shape,
    )
    if spans > 1:
        _join_kernel[(count, queries)](
            rows.lengths, *parts, meta_row, tiles, spans, QUERIES=queries, num_warps=1, **shape
        )
    return output
