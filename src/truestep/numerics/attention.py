"""Causal attention over KV-cache pages, whose result for a token depends only on that token and the tokens before it.

The same code serves prefill, decode, and whole documents in training. It reads the pages of keys in order; keys that a
token does not attend to add zero.

Dimensions: T tokens of the pass, Q query heads, K key-value heads, E head size, F size of a value's head, S sequences,
P pages of a sequence, N tiles of queries.
"""

import torch

from truestep.numerics import plain
from truestep.numerics.arithmetic import by_kernels
from truestep.numerics.queries import Queries


def attend(
    queries: Queries,
    q: torch.Tensor,  # [T, Q, E]
    keys: torch.Tensor,  # [pages, K, tokens of a page, E], with any strides
    values: torch.Tensor,  # [pages, K, tokens of a page, F]
    scale: float,
    window: int | None,
    softcap: float | None,
    places: torch.Tensor | None = None,  # [2] int64 on the device: the addresses of keys and values
    sinks: torch.Tensor | None = None,  # [Q] one more score per query head, without a value
) -> torch.Tensor:  # [T, Q, F]
    if by_kernels(q):
        from truestep.numerics import attend_kernels

        return attend_kernels.attend(queries, q, keys, values, scale, window, softcap, places, sinks)
    if queries.rows is not None:
        all_rows = queries.rows, queries.table
        return _attend(q[:, None], *all_rows, keys, values, scale, window, softcap, sinks).flatten(0, 1)
    output = q.new_zeros(q.shape[0], q.shape[1], values.shape[3])
    for span in queries.spans:
        end = span.start + span.count
        start = torch.tensor([span.start], device=q.device)
        pages = queries.table[span.sequence : span.sequence + 1, : -(-end // keys.shape[2])]
        own = slice(span.first, span.first + span.count)
        output[own] = _attend(q[own][None], start, pages, keys, values, scale, window, softcap, sinks)[0]
    return output


def _attend(
    q: torch.Tensor,  # [S, T, Q, E]
    start: torch.Tensor,  # [S]
    table: torch.Tensor,  # [S, P]
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # [S, T, Q, F]
    count, heads = q.shape[1], keys.shape[1]
    # [S, P, K, page, E] -> [S, K, P · page, E]
    k, v = (pool[table].transpose(1, 2).flatten(2, 3) for pool in (keys, values))
    grouped = q.unflatten(2, (heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [S, K, T · Q / K, E]
    scores = plain.product(grouped, k) * scale
    if softcap is not None:
        scores = plain.each(torch.tanh, scores / softcap) * softcap
    own = (start[:, None] + torch.arange(count, device=q.device)).repeat_interleave(q.shape[2] // heads, 1)[..., None]
    positions = torch.arange(k.shape[2], device=q.device)
    seen = positions <= own
    if window is not None:
        seen = seen & (positions > own - window)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if sinks is None:
        weights = plain.each(torch.exp, scores - highest)
        total = plain.row_sum(weights)[..., None]
    else:
        column = (
            sinks.to(scores.dtype).view(heads, 1, -1).repeat(1, count, 1).flatten(1)[..., None]
        )  # [K, T · Q / K, 1]
        highest = torch.maximum(highest, column)
        weights = plain.each(torch.exp, scores - highest)
        total = plain.row_sum(weights)[..., None] + plain.each(torch.exp, column - highest)
    result = plain.product(weights, v.transpose(-1, -2)) / total  # [S, K, T · Q / K, F]
    return result.to(q.dtype).unflatten(2, (count, -1)).transpose(1, 2).flatten(2, 3)
