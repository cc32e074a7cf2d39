"""The engine computing exactly: its log-probs are those that training finds, to the last bit (see `policy.exact`).

Prompts in pieces and single tokens attend over the cache with the code that training attends with. Before an engine
samples so, it compares itself with training on this machine, bit by bit.
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


_PIECE_TOKENS = 8192  # of prompts in a step: no CUDA graph has them, so few large passes cost the host least


def exact_device(device: Device) -> Device:
    """Give the device as it computes exactly."""
    pieces = max(_PIECE_TOKENS, device.piece_tokens)
    return replace(device, page_size=page_of(device.place), piece_tokens=pieces, compiles=False, fused=False)


def pools_of(
    cache: PagedCache, pages: torch.Tensor, offsets: torch.Tensor, store: Callable[..., None]
) -> Pools:  # [T], [T]
    """Give what writes a layer's new keys and values and finds its pages."""

    def pools(
        layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        store(cache, layer, pages, offsets, keys, values)
        return cache.keys[layer], cache.values[layer], None if cache.places is None else cache.places[layer]

    return pools


def pieces_pass(
    cache: PagedCache, spans: Sequence[tuple[int, int, tuple[int, ...]]], send: Send, store: Callable[..., None]
) -> tuple[torch.Tensor, ExactPass]:
    """Lay out pieces of prompts, each of which has its tokens before it, its own, and its pages: give their tokens'
    positions, and the pass."""
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
    pages: torch.Tensor,  # [R] where each row's new token goes
    offsets: torch.Tensor,  # [R]
    before: torch.Tensor,  # [R] tokens of the row before the new one
    table: torch.Tensor,  # [R, P]
    send: Send,
    store: Callable[..., None],
) -> ExactPass:
    """Lay out one token of each row."""
    return ExactPass(Queries(table, [], send, rows=before), pools_of(cache, pages, offsets, store))


def choose_exactly(hidden: torch.Tensor, policy: Policy, rows: DrawRows, draw: Callable[..., Drawn]) -> Drawn:  # [R, H]
    """Draw each row's next token; give the log-prob that training will find."""
    head = policy.head
    raw = exact_raw_logits(hidden, policy.head_weight, head.fp32)
    drawn = draw(raw.clone(), rows, head)  # it may write over the logits
    return Drawn.of(drawn.tokens, exact_logprobs(raw, drawn.tokens, rows.divisor, head), drawn.log_mass)


def make_exact(policy: Policy, layers: list[LayerShape], device: Device) -> None:
    """Make a policy compute exactly: by compiled layers on a GPU where they do, else by its own code."""
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
    """Compare the engine's hidden states with training's, bit by bit: in pieces, among other documents, and token by
    token. Raise where they differ."""
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
    for piece in (5, page + 3):  # the rest is decoded
        counts = [min(piece, len(ids) - at) for ids, at in zip(documents, done, strict=True)]
        members = [number for number, count in enumerate(counts) if count > 0]
        spans = [
            (done[number], counts[number], own[number][: -(-(done[number] + counts[number]) // page)])
            for number in members
        ]
        ids = np.concatenate([documents[number][done[number] : done[number] + counts[number]] for number in members])
        positions, step = pieces_pass(cache, spans, send, store)
        hidden = exact_hidden(policy.model, send(ids), positions, step)
        for number, part in zip(members, hidden.split([counts[number] for number in members]), strict=True):
            found[number].append(part)
            done[number] += counts[number]
    table = np.full((len(documents), max(map(len, own))), cache.spare)
    for number, taken in enumerate(own):
        table[number, : len(taken)] = taken
    while members := [number for number, ids in enumerate(documents) if done[number] < len(ids)]:
        rest = len(members)
        members = members if rest > 1 else members * 2  # compiled code treats a single row apart
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
