"""The model's own code over the paged cache: transformers' modules, with attention replaced as in training.

A model is served if it computes with the engine what it computes in training. That is measured once, on its own
weights; a model that is not served is named with the reason.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from truestep.generate.engine.attend import NAME, Paged, Pieces, Recorded, Rows, UnservedError, attend_rows, make_pieces
from truestep.generate.engine.cache import LayerShape, PagedCache
from truestep.model.fast import compiled as compiled_code
from truestep.model.mixers import attention
from truestep.model.policy import Policy
from truestep.rollouts.packing import pack_tokens
from truestep.weights.layers import layers_of

log = logging.getLogger(__name__)

_PROBE_TOKENS, _PROBE_PIECES = 13, (5, 9)  # the rest is decoded
_MANY = 64, 8  # prompts, and tokens of each
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative, as of the probe at load
_HALF_TOLERANCE = 0.1


@contextmanager
def paged(policy: Policy) -> Iterator[None]:
    """Have the policy attend over a paged cache; transformers' recomputation, which training may use, is off."""
    with attention.using(policy.model, NAME), policy.tokens_everywhere():
        yield


@contextmanager
def compiled_layers(model: Any, compiled: dict[Any, Any]) -> Iterator[None]:
    """Run the layers compiled: their norms, rotary embeddings and activations in a few kernels. So are the cosines and
    sines that they are given, and norms outside of them, which round as their own code does: training compiles none.
    `compiled` keeps what was compiled from one phase to the next."""
    layers, norms = layers_of(model)[1], _norms_of(model)
    modules = [*layers, *_turns_of(model), *norms]
    before = [module.forward for module in modules]
    try:
        for module in modules:
            if module not in compiled:
                from truestep.model.fast.fused_products_compiler import (
                    sampling_backend,  # the compiler, which takes a second
                )

                own = compiled_code.own_forward(module)
                backend = sampling_backend(compiled_code.BACKEND, rounds=module in norms)
                compiled[module] = torch.compile(own, dynamic=True, backend=backend)
            module.forward = compiled[module]
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.forward = forward


def _turns_of(model: Any) -> list[Any]:
    """Find what makes the cosines and sines of positions, outside the layers: modules of fixed frequencies alone. What
    they give depends on nothing but the positions, or the engine does not serve the model (see `shapes_of`)."""
    inside = {module for layer in layers_of(model)[1] for module in layer.modules()}
    return [
        module
        for module in model.modules()
        if hasattr(module, "rope_type")
        and module not in inside
        and not any(module.children())
        and not any(True for _ in module.parameters())
    ]


def _norms_of(model: Any) -> list[Any]:
    """Find the norms outside the layers: modules beside their list, of nothing but lines of weights."""
    body = model.get_submodule(layers_of(model)[0].rpartition(".")[0])
    return [
        module
        for module in body.children()
        if not any(module.children()) and {weight.ndim for weight in module.parameters()} == {1}
    ]


def run_model(
    policy: Policy, ids: torch.Tensor, positions: torch.Tensor, step: Pieces | Rows | Recorded
) -> torch.Tensor:
    """Give the last hidden states of tokens: [T], [T] -> [T, H]."""
    output = policy.model.base_model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, paged=Paged(step)
    )
    return output.last_hidden_state[0]


def shapes_of(policy: Policy) -> list[LayerShape]:
    """Find what each layer keeps of a token; raise where the engine cannot serve the model."""
    for module in policy.model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if kinds & {"dynamic", "longrope"}:
            raise UnservedError("its RoPE changes with the longest sequence of a batch")
    recorded = Recorded()
    device = policy.device
    with paged(policy):
        run_model(policy, torch.zeros(2, dtype=torch.int64, device=device), torch.arange(2, device=device), recorded)
    count = policy.model.config.get_text_config().num_hidden_layers
    if set(recorded.layers) != set(range(count)):
        raise UnservedError(f"{len(recorded.layers)} of its {count} layers attend: the others keep another state")
    return [recorded.layers[layer] for layer in range(count)]


def _sender(device: torch.device) -> Callable[[np.ndarray], torch.Tensor]:
    return lambda values: torch.from_numpy(values).to(device)


def run_many(policy: Policy, layers: list[LayerShape], page_size: int) -> None:
    """Run many tokens at once: the compiler divides work among a GPU's threads by the first size that it sees."""
    prompts, each = _MANY

    pages = -(-each // page_size)
    cache = PagedCache.make(layers, prompts * pages, page_size, policy.weights.dtype, policy.device)
    spans = [(0, each, tuple(range(pages * number, pages * (number + 1)))) for number in range(prompts)]
    with paged(policy):
        step = make_pieces(cache, spans, _sender(policy.device))
        run_model(policy, torch.zeros(prompts * each, dtype=torch.int64, device=policy.device), step.positions, step)


def probe(policy: Policy, layers: list[LayerShape], page_size: int) -> None:
    """Compare the engine's hidden states with training's on a few tokens; raise where they differ."""
    device = policy.device
    generator = np.random.default_rng(0)
    ids = generator.integers(0, policy.vocabulary_size, _PROBE_TOKENS)
    # Without context ranks, not all of which may be sampling; tensor ranks are. These have a share each of the tokens.
    expected = policy.hidden_alone(pack_tokens([ids], policy.weights.ranks.tensor)).float()[: len(ids)]
    pages = tuple(range(1, 2 + _PROBE_TOKENS // page_size))
    cache = PagedCache.make(layers, len(pages) + 1, page_size, policy.weights.dtype, device)
    tokens = torch.from_numpy(ids).to(device)
    found = []

    with paged(policy):
        start = 0
        for end in _PROBE_PIECES:
            step = make_pieces(cache, [(start, end - start, pages)], _sender(device))
            found.append(run_model(policy, tokens[start:end], step.positions, step))
            start = end
        for at in range(start, _PROBE_TOKENS):  # two equal rows: compiled code treats a single one apart
            rows = Rows(
                cache,
                pages=torch.tensor([pages[at // page_size]] * 2, device=device),
                offsets=torch.tensor([at % page_size] * 2, device=device),
                lengths=torch.tensor([at + 1] * 2, device=device),
                table=torch.tensor([pages] * 2, device=device),
                longest=at + 1,
                attend=attend_rows,
            )
            positions = torch.tensor([at] * 2, device=device)
            found.append(run_model(policy, tokens[at].expand(2), positions, rows)[:1])
    difference = (torch.cat(found).float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-12)
    worst = float(difference.max())
    allowed = _TOLERANCE.get(policy.weights.dtype, _HALF_TOLERANCE)
    if not worst <= allowed:
        raise UnservedError(f"with the paged KV cache its hidden states differ by {worst:.0e} from those of training")
