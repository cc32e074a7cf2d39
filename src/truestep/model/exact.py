"""Batch-invariant hidden states: a token's last hidden state is bit-identical whatever else is in the batch.

It depends only on the token and the tokens before it (see `truestep.numerics`). The sampler's engine and training's
log-probs of documents both use this module, so they agree bit for bit.

Dimensions: T tokens of a pass, Q query heads, K key-value heads, E head size, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import AttentionInterface

from truestep.model.fast.by_class import own_code
from truestep.model.fast.compiled import own_forward
from truestep.model.handed import handed
from truestep.model.mixers import attention
from truestep.model.policy import Policy
from truestep.numerics import compiling
from truestep.numerics.attention import attend
from truestep.numerics.operations import Exactly, InexactError, by_itself
from truestep.numerics.queries import Queries, Span, page_of
from truestep.types import sent
from truestep.weights.layers import layers_of

NAME = "truestep_exact"


@dataclass
class ExactPass:
    """The inputs of attention in one pass. A model hands it to its attention as the keyword `exact`."""

    queries: Queries
    # Writes a layer's new keys and values to the KV cache, and returns the pages of both and their addresses for
    # kernels. None: no cache; the pass's own keys and values are the pages.
    pools: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] | None = None


@torch.compiler.disable
def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Q, T, E]
    key: torch.Tensor,  # [1, K, T, E]
    value: torch.Tensor,  # [1, K, T, E]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    exact: ExactPass | None = None,
    s_aux: torch.Tensor | None = None,  # [Q] the heads' sinks
    **unused: object,
) -> tuple[torch.Tensor, None]:  # [1, T, Q, E]
    """Compute batch-invariant attention. transformers calls this under `NAME`."""
    layer: Any = getattr(module, "layer_idx", None)
    exact, sliding_window = handed("exact", exact), handed("sliding_window", sliding_window)
    if exact is None or layer is None:
        raise InexactError(f"sampler.exact: {type(module).__name__} passes no keyword arguments on to its attention")
    if not getattr(module, "is_causal", True):
        raise InexactError(f"sampler.exact: {type(module).__name__} is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with by_itself():
        places = None
        if exact.pools is None:
            # [K, T, E] -> [pages, K, page, E]
            keys, values = (
                tensor[0].unflatten(1, (-1, page_of(tensor.device))).transpose(0, 1) for tensor in (key, value)
            )
        else:
            keys, values, places = exact.pools(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        q = query[0].transpose(0, 1)
        return attend(exact.queries, q, keys, values, scale, sliding_window, softcap, places, s_aux)[None], None


# The compiled forward of each layer, by model. The sampler and training use the same compiled code.
_COMPILED: WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()


# Raise at the recompile limit: torch would fall back to eager code, which may round differently.
_REFUSALS: dict[str, Any] = {
    name: True for name in ("fail_on_recompile_limit_hit",) if hasattr(torch._dynamo.config, name)
}


def compile_exactly(model: Any, on: bool) -> None:
    """Switch compiled layers on or off for exact passes."""
    _COMPILED.pop(model, None)
    if on:
        layers: list[Any] = layers_of(model)[1]
        _COMPILED[model] = {layer: _compiled(layer) for layer in layers}


def _compiled(layer: Any) -> Callable[..., Any]:
    compute = torch.compile(own_forward(layer), dynamic=True, backend=compiling.backend)

    def forward(*arguments: Any, **options: Any) -> Any:
        # torch.compile does not work inside `Exactly`, so the mode is left. Compiled code is exact without the mode.
        with by_itself():
            return compute(*arguments, **options)

    return forward


@contextmanager
def exactly(model: Any) -> Iterator[None]:
    """Use exact attention within the block, and compiled layers if `compile_exactly` switched them on."""
    compiled = _COMPILED.get(model, {})
    before = {layer: layer.forward for layer in compiled}
    with attention.using(model, NAME), own_code(), torch._dynamo.config.patch(_REFUSALS):
        try:
            for layer, forward in compiled.items():
                layer.forward = forward
            yield
        finally:
            for layer, forward in before.items():
                layer.forward = forward


@torch.no_grad()
def exact_hidden(model: Any, ids: torch.Tensor, positions: torch.Tensor, step: ExactPass) -> torch.Tensor:
    """Compute the last hidden states of tokens: [T], [T] -> [T, H]. Call inside `exactly`."""
    with Exactly():
        output = model.base_model(
            input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, exact=step
        )
    return output.last_hidden_state[0]


@torch.no_grad()
def documents_hidden(policy: Policy, documents: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Compute the last hidden states of whole documents, each [tokens, H]. Call inside `exactly`."""
    page = page_of(policy.device)
    bounds = np.cumsum([0, *(-(-len(ids) // page) for ids in documents)])  # first page of each document, in pages
    flat, positions = np.zeros((2, bounds[-1] * page), dtype=np.int64)
    spans = []
    table = np.zeros((len(documents), int(np.diff(bounds).max(initial=1))), dtype=np.int64)
    for number, ids in enumerate(documents):
        first = int(bounds[number]) * page
        flat[first : first + len(ids)], positions[first : first + len(ids)] = ids, np.arange(len(ids))
        pages = np.arange(bounds[number], bounds[number + 1])
        table[number, : len(pages)] = pages
        spans.append(Span(first, len(ids), 0, number))

    def send(values: np.ndarray) -> torch.Tensor:
        return sent(torch.from_numpy(values), policy.device)

    step = ExactPass(Queries(send(table), spans, send))
    hidden = exact_hidden(policy.model, send(flat), send(positions), step)
    return [hidden[span.first : span.first + span.count] for span in spans]


AttentionInterface.register(NAME, exact_attention)
