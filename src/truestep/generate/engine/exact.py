"""Exact sampling: the engine's log-probs equal those of training bit by bit (see `model.exact`).

Prefill and decode attend over the KV cache with the code that training uses. Before the first use, the engine's hidden
states are compared with those of training on this machine, bit by bit.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from truestep.generate.engine.attend import places_of
from truestep.generate.engine.cache import LayerShape, PagedCache
from truestep.generate.engine.device import Device
from truestep.generate.engine.draw import Drawn, DrawRows
from truestep.head.exact import exact_logprobs, exact_raw_logits
from truestep.model.exact import ExactPass, compile_exactly, documents_hidden, exact_hidden, exactly
from truestep.model.policy import Policy
from truestep.numerics.operations import InexactError
from truestep.numerics.queries import Queries, Send, Span, page_of

log = logging.getLogger(__name__)

Pools = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


_CHUNK_TOKENS = 8192  # prompt tokens of a step. Exact prefill uses no CUDA graph, so large steps save launch time


def exact_device(device: Device) -> Device:
    """Return the device's settings for exact sampling."""
    chunks = max(_CHUNK_TOKENS, device.chunk_tokens)
    return replace(device, page_size=page_of(device.place), chunk_tokens=chunks, compiles=False, fused=False)


def pools_of(
    cache: PagedCache, pages: torch.Tensor, offsets: torch.Tensor, store: Callable[..., None]
) -> Pools:  # [T], [T]
    """Return a function that writes a layer's new keys and values, and returns the layer's cache and its addresses."""

    def pools(
        layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        store(cache, layer, pages, offsets, keys, values)
        return cache.keys[layer], cache.values[layer], None if cache.places is None else cache.places[layer]

    return pools


def chunks_pass(
    cache: PagedCache, spans: Sequence[tuple[int, int, tuple[int, ...]]], send: Send, store: Callable[..., None]
) -> tuple[torch.Tensor, ExactPass]:
    """Return the positions of all tokens, and the pass over prompt chunks. `spans`: for each chunk its start in the
    prompt, its number of tokens, and the prompt's pages up to its end."""
    positions, pages, offsets = places_of(list(spans), cache.page_size)
    sent = send(np.stack([pages, offsets]))
    table = np.full((len(spans), max(len(own) for _, _, own in spans)), cache.spare)
    queries: list[Span] = []
    first = 0
    for number, (start, count, own) in enumerate(spans):
        table[number, : len(own)] = own
        queries.append(Span(first, count, start, number))
        first += count
    return send(positions), ExactPass(Queries(send(table), queries, send), pools_of(cache, sent[0], sent[1], store))


def rows_pass(
    cache: PagedCache,
    pages: torch.Tensor,  # [R] page of each row's new token
    offsets: torch.Tensor,  # [R] its offset in the page
    before: torch.Tensor,  # [R] tokens of the row before the new one
    table: torch.Tensor,  # [R, P] pages of each row
    send: Send,
    store: Callable[..., None],
) -> ExactPass:
    """Return the pass that decodes one token of each row."""
    return ExactPass(Queries(table, [], send, rows=before), pools_of(cache, pages, offsets, store))


def choose_exactly(hidden: torch.Tensor, policy: Policy, rows: DrawRows, draw: Callable[..., Drawn]) -> Drawn:  # [R, H]
    """Draw each row's next token. Its log-prob is computed as training computes it."""
    head = policy.head
    raw = exact_raw_logits(hidden, policy.head_weight, head.fp32)
    drawn = draw(raw.clone(), rows, head)  # `draw` may overwrite the logits
    return Drawn.of(drawn.tokens, exact_logprobs(raw, drawn.tokens, rows.divisor, head), drawn.log_mass)


def make_exact(policy: Policy, layers: list[LayerShape], device: Device) -> None:
    """Prepare a policy for exact passes: with compiled layers on a GPU if they are exact, else with the model's
    code."""
    if device.place.type == "cuda":
        try:
            compile_exactly(policy.model, True)
            check_exact(policy, layers, device)
            return
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's errors have no common type
            compile_exactly(policy.model, False)
            problem = f"{type(error).__name__}: {str(error)[:500]}"
            log.warning("exact passes run without compiled layers, which is slower: %s", problem)
    check_exact(policy, layers, device)


def check_exact(policy: Policy, layers: list[LayerShape], device: Device) -> None:
    """Compare the engine's hidden states with those of training, bit by bit, for chunked prefill, several prompts at a
    time, and decode. Raise `InexactError` if they differ."""
    generator = np.random.default_rng(0)
    page = device.page_size
    lengths = (2 * page + 19, page + 5, page)
    documents = [generator.integers(0, policy.vocabulary_size, length) for length in lengths]
    with exactly(policy.model):
        expected = documents_hidden(policy, documents)
        found = _by_engine(policy, layers, device, documents)
    for right, got in zip(expected, found, strict=True):
        if not torch.equal(right, got):
            off = int((right != got).any(-1).sum())
            raise InexactError(
                f"sampler.exact: on this machine the sampler's hidden states differ from training's at {off} of "
                f"{len(right)} tokens: leave out sampler.exact"
            )


def _by_engine(
    policy: Policy, layers: list[LayerShape], device: Device, documents: Sequence[np.ndarray]
) -> list[torch.Tensor]:
    page = device.page_size
    own: list[tuple[int, ...]] = []
    for ids in documents:
        first = own[-1][-1] + 1 if own else 1
        own.append(tuple(range(first, first + -(-len(ids) // page))))
    cache = PagedCache.make(layers, own[-1][-1] + 1, page, policy.weights.dtype, device.place)
    cache.locate()
    send, store = device.send, device.store
    found: list[list[torch.Tensor]] = [[] for _ in documents]
    done = [0] * len(documents)
    for chunk in (5, page + 3):  # sizes of two prompt chunks; the rest is decoded
        counts = [min(chunk, len(ids) - at) for ids, at in zip(documents, done, strict=True)]
        members = [number for number, count in enumerate(counts) if count > 0]
        spans = [
            (done[number], counts[number], own[number][: -(-(done[number] + counts[number]) // page)])
            for number in members
        ]
        ids = np.concatenate([documents[number][done[number] : done[number] + counts[number]] for number in members])
        positions, step = chunks_pass(cache, spans, send, store)
        hidden = exact_hidden(policy.model, send(ids), positions, step)
        for number, part in zip(members, hidden.split([counts[number] for number in members]), strict=True):
            found[number].append(part)
            done[number] += counts[number]
    table = np.full((len(documents), max(map(len, own))), cache.spare)
    for number, taken in enumerate(own):
        table[number, : len(taken)] = taken
    while members := [number for number, ids in enumerate(documents) if done[number] < len(ids)]:
        rest = len(members)
        members = members if rest > 1 else members * 2  # torch.compile specialises for a single row
        at = np.array([done[number] for number in members])
        rows = table[members]
        pages, offsets = send(np.stack([rows[np.arange(len(members)), at // page], at % page]))
        step = rows_pass(
            cache,
            pages,
            offsets,
            before=send(at),
            table=send(rows),
            send=send,
            store=store,
        )
        ids = np.array([documents[number][done[number]] for number in members])
        hidden = exact_hidden(policy.model, send(ids), send(at), step)
        for number, part in zip(members[:rest], hidden, strict=False):
            found[number].append(part[None])
            done[number] += 1
    return [torch.cat(parts) for parts in found]
