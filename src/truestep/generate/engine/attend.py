"""Attention over the paged KV cache. `NAME` is registered with transformers, whose modules then call `paged_attention`.

A forward pass either prefills prompt chunks, packed one after another, or decodes one token of each row. Here both are
in plain torch for any device; `attend_kernels` has the decode kernel for GPUs.

Dimensions: T tokens of the pass, R rows, Q query heads, K key-value heads, E head size, P pages of a row.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from truestep.generate.engine.cache import LayerShape, PagedCache, gather, store
from truestep.generate.engine.recur import ChunkStates, RecordedStates, RowStates
from truestep.model.handed import handed
from truestep.model.mixers.attention import PackedLayout, attend_to_past, make_layout, packed_attention

NAME = "truestep_paged"
_SCORES_BYTES = 256 * 2**20  # most memory for attention scores, or for gathered keys


@dataclass(frozen=True)
class ChunkSpan:
    """The position of a prompt chunk in its pass and in its prompt."""

    first: int  # index of its first token in the pass
    count: int
    start: int  # tokens of the prompt before the chunk
    pages: torch.Tensor | None  # pages of the prompt up to the chunk's end; None: the chunk begins its prompt


@dataclass(frozen=True)
class KeyPlaces:
    """The keys that the chunks of a pass attend to, in host memory: all tokens of their prompts up to the chunks' ends,
    packed."""

    pages: np.ndarray  # [Y]
    offsets: np.ndarray  # [Y]
    bounds: np.ndarray  # [chunks + 1] int32: cumulative lengths
    longest: int

    @staticmethod
    def of(spans: Sequence[tuple[int, int, tuple[int, ...]]], page_size: int) -> "KeyPlaces":
        """`spans` as in `make_prefill`."""
        ends = [start + count for start, count, _ in spans]
        _, pages, offsets = places_of([(0, start + count, own) for start, count, own in spans], page_size)
        return KeyPlaces(pages, offsets, np.cumsum([0, *ends], dtype=np.int32), max(ends))

    def padded(self, size: int, end: int, bounds: int, spare: int) -> "KeyPlaces":
        """Pad to `size` tokens and `bounds` bounds. The first padding chunk attends to the tokens up to `end`, the
        others to none. `spare` is the page of the padding tokens."""
        zeros = np.zeros(size - len(self.pages), dtype=np.int64)
        ends = np.full(bounds - len(self.bounds), end, dtype=np.int32)
        pages, offsets = np.concatenate([self.pages, zeros + spare]), np.concatenate([self.offsets, zeros])
        return KeyPlaces(pages, offsets, np.concatenate([self.bounds, ends]), size)


@dataclass(frozen=True)
class Past:
    """All later chunks of a pass together, with the tokens before them, for the fused kernel."""

    pages: torch.Tensor  # [Y] page of each token of the prompts, up to the ends of the chunks
    offsets: torch.Tensor  # [Y]
    bounds: tuple[torch.Tensor, torch.Tensor]  # cumulative lengths of the chunks, and of their keys
    longest: tuple[int, int]


@dataclass
class PromptChunks:
    """A prefill pass over prompt chunks."""

    cache: PagedCache
    positions: torch.Tensor  # [T] of the tokens in their prompts
    pages: torch.Tensor  # [T] page of each token's keys and values
    offsets: torch.Tensor  # [T] offset in the page
    whole: list[ChunkSpan]  # chunks that begin their prompt: they come first, and attend only to themselves
    later: list[ChunkSpan]  # chunks that attend to earlier tokens in the cache, too
    layout: PackedLayout | None  # the layout of the chunks in `whole`; None: no chunks
    store: Callable[..., None] = store
    # For the chunks in `later`, or for all chunks if both lists are empty. None: chunks attend one by one, in plain
    # torch.
    past: Past | None = None
    gather: Callable[..., tuple[torch.Tensor, torch.Tensor]] = gather
    states: ChunkStates | None = None  # None: the model has no recurrent states

    def recur(self, *operation: Any) -> Any:
        return _there(self.states).recur(*operation)


@dataclass
class Rows:
    """A decode pass over one token of each row."""

    cache: PagedCache
    pages: torch.Tensor  # [R] page of each token's keys and values
    offsets: torch.Tensor  # [R] offset in the page
    lengths: torch.Tensor  # [R] tokens of the row, including the new one
    table: torch.Tensor  # [R, P] pages of each row
    longest: int  # upper bound of `lengths`
    # Writes the new tokens' keys and values to the cache and attends, as `attend_rows` does.
    attend: Callable[..., torch.Tensor]
    states: RowStates | None = None  # None: the model has no recurrent states

    def recur(self, *operation: Any) -> Any:
        return _there(self.states).recur(*operation)


@dataclass
class Recorded:
    """A trial pass that records what each layer stores. Every token attends only to itself."""

    states: RecordedStates
    layers: dict[int, LayerShape] = field(default_factory=dict)  # of the layers with attention

    def recur(self, *operation: Any) -> Any:
        return self.states.recur(*operation)


@dataclass
class Paged:
    """The keyword argument that a model passes on to its attention. One type for all passes saves recompilations."""

    step: PromptChunks | Rows | Recorded


class UnservedError(Exception):
    """The engine cannot serve the model; the message says why."""


def _there(states: ChunkStates | RowStates | None) -> ChunkStates | RowStates:
    if states is None:
        raise UnservedError("it keeps states that it did not have in the trial pass")
    return states


@torch.compiler.disable  # compiled layers call it, as in training
def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Q, T, E]
    key: torch.Tensor,  # [1, K, T, E]
    value: torch.Tensor,  # [1, K, T, E]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: Paged | None = None,
    s_aux: torch.Tensor | None = None,  # [Q] the heads' sinks
    **unused: object,
) -> tuple[torch.Tensor, None]:  # [1, T, Q, E]
    """Attend over the cache; transformers calls this."""
    layer: Any = getattr(module, "layer_idx", None)
    paged, sliding_window = handed("paged", paged), handed("sliding_window", sliding_window)
    if paged is None or layer is None:
        raise UnservedError(f"{type(module).__name__} passes no keyword arguments on to its attention")
    step = paged.step
    if isinstance(step, Recorded):
        if layer in step.layers:
            raise UnservedError(f"{type(module).__name__} attends more than once in layer {layer}")
        step.layers[layer] = LayerShape(
            key.shape[1],
            key.shape[-1],
            value.shape[-1],
            query.shape[1],
            sliding_window,
            softcap,
            s_aux is not None,
        )
        repeats = query.shape[1] // value.shape[1]
        return value.repeat_interleave(repeats, dim=1).transpose(1, 2).contiguous(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(step, Rows):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return step.attend(step, layer, q, k, v, scale, sliding_window, softcap, s_aux)[None], None
    return _attend_chunks(module, step, layer, query, key, value, scale, sliding_window, softcap, s_aux), None


def _attend_chunks(
    module: torch.nn.Module,
    chunks: PromptChunks,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # [1, T, Q, E]
    chunks.store(chunks.cache, layer, chunks.pages, chunks.offsets, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys, values = chunks.cache.keys[layer], chunks.cache.values[layer]
    outputs = []
    if chunks.layout is not None:
        count = query.shape[2] - sum(chunk.count for chunk in chunks.later)
        first, _ = packed_attention(
            module,
            query[:, :, :count],
            key[:, :, :count],
            value[:, :, :count],
            None,
            scale,
            sliding_window=window,
            softcap=softcap,
            packed_layout=chunks.layout,
            s_aux=sinks,
        )
        outputs.append(first)
    if chunks.past is not None and softcap is None:
        past, first_later = chunks.past, chunks.later[0].first if chunks.later else 0
        k, v = chunks.gather(chunks.cache, layer, past.pages, past.offsets)
        q = query[0, :, first_later:].transpose(0, 1)
        outputs.append(attend_to_past(q, k, v, past.bounds, past.longest, scale, window, sinks)[None])
    for chunk in chunks.later if chunks.past is None or softcap is not None else ():
        assert chunk.pages is not None
        end = chunk.start + chunk.count
        # [P, K, page, E] -> [K, end, E]
        k, v = (pool.index_select(0, chunk.pages).transpose(0, 1).flatten(1, 2)[:, :end] for pool in (keys, values))
        q = query[0, :, chunk.first : chunk.first + chunk.count]
        outputs.append(see_earlier(q, k, v, chunk.start, scale, window, softcap, sinks).transpose(0, 1)[None])
    # A single output is not passed to `cat`, which would copy it. It is detached, because compiled layers would be
    # recompiled for a view.
    return outputs[0].detach().contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)


def see_earlier(
    q: torch.Tensor,  # [Q, X, E]
    k: torch.Tensor,  # [K, N, E]
    v: torch.Tensor,  # [K, N, E]
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # [Q, X, E]
    """Attend from the tokens after the first `start` to all tokens up to their own, in plain torch."""
    grouped = q.unflatten(0, (k.shape[0], -1))
    column = None if sinks is None else sinks.view(k.shape[0], -1, 1, 1)
    positions = torch.arange(k.shape[1], device=q.device)
    step = max(1, _SCORES_BYTES // (4 * q.shape[0] * k.shape[1]))
    outputs = []
    for first in range(0, q.shape[1], step):
        some = grouped[:, :, first : first + step]
        own = torch.arange(start + first, start + first + some.shape[2], device=q.device)[:, None]
        mask = positions <= own
        if window is not None:
            mask = mask & (positions > own - window)
        outputs.append(_weigh(some, k[:, None], v[:, None], mask, scale, softcap, column))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).flatten(0, 1)


def _weigh(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # one more column of scores, which has no value
) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill_(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(-1).to(q.dtype) @ v
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1].to(q.dtype) @ v


def attend_rows(
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
    """Write the new keys and values, and attend, in plain torch: as many rows at a time as `_SCORES_BYTES` allows."""
    store(rows.cache, layer, rows.pages, rows.offsets, k, v)
    keys, values = rows.cache.keys[layer], rows.cache.values[layer]
    count, width = rows.table.shape
    each = width * keys[0].numel() * keys.element_size()
    step = max(1, _SCORES_BYTES // each)
    positions = torch.arange(width * keys.shape[2], device=q.device)
    outputs = []
    for first in range(0, count, step):
        part = slice(first, first + step)
        table, lengths = rows.table[part], rows.lengths[part, None]
        # [R · P, K, page, E] -> [R, K, P · page, E]
        own_k, own_v = (
            pool.index_select(0, table.flatten()).unflatten(0, table.shape).transpose(1, 2).flatten(2, 3)
            for pool in (keys, values)
        )
        mask = positions < lengths
        if window is not None:
            mask = mask & (positions >= lengths - window)
        # [R, K, Q / K, E]; the scores are [R, K, Q / K, N]
        grouped = q[part].unflatten(1, (own_k.shape[1], -1))
        column = None if sinks is None else sinks.view(own_k.shape[1], -1, 1)
        outputs.append(_weigh(grouped, own_k, own_v, mask[:, None, None], scale, softcap, column).flatten(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def make_prefill(
    cache: PagedCache,
    spans: list[tuple[int, int, tuple[int, ...]]],
    send: Callable[[np.ndarray], torch.Tensor],
    store: Callable[..., None] = store,
    fused: bool = False,
    slots: Sequence[int] = (),
) -> PromptChunks:
    """Make a prefill pass. `spans`: for each chunk its start in the prompt, its number of tokens, and the prompt's
    pages up to its end; chunks that begin a prompt come first. `fused`: later chunks attend by the fused kernel.
    `slots`: the slot of each prompt's state, if the model has recurrent states."""
    whole: list[ChunkSpan] = []
    later: list[ChunkSpan] = []
    first = 0
    for start, count, own in spans:
        assert start or not later
        if start:
            later.append(ChunkSpan(first, count, start, send(np.array(own))))
        else:
            whole.append(ChunkSpan(first, count, start, None))
        first += count
    layout = None
    if whole:
        bounds = torch.tensor([0, *(span.count for span in whole)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        layout = make_layout(bounds, cache.keys[0].device, send=lambda tensor: send(tensor.numpy()))
    positions, pages, offsets = places_of(spans, cache.page_size)
    sent = send(np.stack([pages, offsets]))
    # The positions are sent as a tensor of their own: compiled layers would be recompiled for a view.
    past = make_past(spans[len(whole) :], cache.page_size, send) if fused and later else None
    states = _chunk_states(cache, whole, later, slots, send) if cache.states else None
    return PromptChunks(cache, send(positions), sent[0], sent[1], whole, later, layout, store, past, states=states)


def _chunk_states(
    cache: PagedCache,
    whole: Sequence[ChunkSpan],
    later: Sequence[ChunkSpan],
    slots: Sequence[int],
    send: Callable[[np.ndarray], torch.Tensor],
) -> ChunkStates:
    spans = tuple((chunk.first, chunk.first + chunk.count) for chunk in (*whole, *later))
    first = send(np.arange(len(spans)) < len(whole)) if later else None
    bounds = send(np.array([0, *(end for _, end in spans)], dtype=np.int32))
    longest = max(end - start for start, end in spans)
    return ChunkStates(cache, send(np.array(slots)), segments=bounds, longest=longest, spans=spans, first=first)


def make_past(
    spans: list[tuple[int, int, tuple[int, ...]]], page_size: int, send: Callable[[np.ndarray], torch.Tensor]
) -> Past:
    """Describe chunks, with all tokens before them, for the fused kernel. `spans` as in `make_prefill`."""
    keys = KeyPlaces.of(spans, page_size)
    counts = [count for _, count, _ in spans]
    queries = send(np.cumsum([0, *counts], dtype=np.int32))
    sent = send(np.stack([keys.pages, keys.offsets]))
    return Past(sent[0], sent[1], (queries, send(keys.bounds)), (max(counts), keys.longest))


def places_of(
    spans: list[tuple[int, int, tuple[int, ...]]], page_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each token's position in its prompt, its page and its offset in it. `spans` as in `make_prefill`."""
    starts, counts, widths = np.array([(start, count, len(own)) for start, count, own in spans]).T
    table = np.fromiter(itertools.chain.from_iterable(own for _, _, own in spans), np.int64, widths.sum())
    positions = np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)
    pages = table[positions // page_size + np.repeat(widths.cumsum() - widths, counts)]
    return positions, pages, positions % page_size


AttentionInterface.register(NAME, paged_attention)
