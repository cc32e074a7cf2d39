"""The model's forward pass over the paged KV cache: transformers' modules with attention replaced, as in training.

The engine serves a model only if its hidden states agree with those of training. That is measured once, with the
policy's own weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from truestep.generate.engine.attend import (
    NAME,
    Paged,
    PromptChunks,
    Recorded,
    Rows,
    UnservedError,
    attend_rows,
    make_prefill,
)
from truestep.generate.engine.cache import LayerShape, PagedCache
from truestep.generate.engine.recur import RecordedStates, RowStates
from truestep.model.experts.routing import Recorder
from truestep.model.fast import compiled as compiled_code
from truestep.model.loading.same_experts import differences, routes_given, routes_kept
from truestep.model.mixers import attention
from truestep.model.mixers.recurrence import LayerState
from truestep.model.policy import Policy
from truestep.rollouts.packing import pack_tokens
from truestep.weights.layers import layers_of

_PROBE_TOKENS, _PROBE_CHUNKS = 13, (5, 9)  # ends of the prompt chunks; the rest is decoded
_MANY = 64, 8  # prompts, and tokens of each
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative, as for the probe when a model is loaded
_HALF_TOLERANCE = 0.1
_ATTENDS_NOT = LayerShape(0, 1, 1, 0)


@contextmanager
def paged(policy: Policy) -> Iterator[None]:
    """Switch the policy's attention to the paged KV cache inside the block."""
    with attention.using(policy.model, NAME), policy.tokens_everywhere():
        yield


@contextmanager
def compiled_layers(model: Any, compiled: dict[Any, Any]) -> Iterator[None]:
    """Run the model's layers, rotary embeddings and final norms with torch.compile inside the block. Norms outside the
    layers round like their uncompiled code, because training does not compile them. `compiled` is a cache of compiled
    code for all phases of sampling."""
    layers, norms = layers_of(model)[1], _norms_of(model)
    modules = [*layers, *_turns_of(model), *norms]
    before = [module.forward for module in modules]
    try:
        for module in modules:
            if module not in compiled:
                from truestep.model.fast.compiler_backends import rounding_backend  # importing it takes a second

                own = compiled_code.own_forward(module)
                backend: Any = compiled_code.BACKEND
                backend = rounding_backend(backend) if module in norms else backend
                compiled[module] = torch.compile(own, dynamic=True, backend=backend)
            module.forward = compiled[module]
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.forward = forward


def _turns_of(model: Any) -> list[Any]:
    """Find the RoPE modules outside the layers: modules without parameters or children. Their cosines and sines depend
    only on the positions, because `shapes_of` refuses other models."""
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
    """Find the norms outside the layers: siblings of the layer list whose parameters are all one-dimensional."""
    body = model.get_submodule(layers_of(model)[0].rpartition(".")[0])
    return [
        module
        for module in body.children()
        if not any(module.children()) and {weight.ndim for weight in module.parameters()} == {1}
    ]


def run_model(
    policy: Policy, ids: torch.Tensor, positions: torch.Tensor, step: PromptChunks | Rows | Recorded
) -> torch.Tensor:
    """Return the last hidden states of tokens: [T], [T] -> [T, H]."""
    output = policy.model.base_model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, paged=Paged(step)
    )
    return output.last_hidden_state[0]


def shapes_of(policy: Policy) -> list[LayerShape]:
    """Return what each layer stores in the cache. Raise `UnservedError` if the engine cannot serve the model."""
    for module in policy.model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if kinds & {"dynamic", "longrope"}:
            raise UnservedError("its RoPE changes with the longest sequence of a batch")
    recorded, hidden = try_tokens(policy)
    layers = layers_of(policy.model)[1]
    states: dict[int, list[LayerState]] = {}
    for module, recurrence, call in recorded.states.calls:
        number = next((number for number, layer in enumerate(layers) if module in set(layer.modules())), None)
        if number is None:
            raise UnservedError(f"{type(module).__name__} keeps a state and is in none of its layers")
        states.setdefault(number, []).append(recurrence.state(call))
    others = [number for number in range(len(layers)) if number not in recorded.layers and number not in states]
    if others and not torch.equal(hidden[1], try_tokens(policy, (1, 0))[1][1]):
        named = ", ".join(f"{number} ({type(layers[number]).__name__})" for number in others)
        raise UnservedError(f"of its layers {named} neither attend nor recur: they keep another state")
    return [
        replace(recorded.layers.get(number, _ATTENDS_NOT), states=tuple(states.get(number, ())))
        for number in range(len(layers))
    ]


def try_tokens(policy: Policy, ids: tuple[int, int] = (0, 0)) -> tuple[Recorded, torch.Tensor]:
    """Run two tokens, each of which attends only to itself. Return what was recorded, and their hidden states."""
    recorded, tokens = Recorded(RecordedStates(len(ids))), torch.tensor(ids, device=policy.device)
    with paged(policy):
        hidden = run_model(policy, tokens, torch.arange(len(ids), device=policy.device), recorded)
    return recorded, hidden


def _sender(device: torch.device) -> Callable[[np.ndarray], torch.Tensor]:
    return lambda values: torch.from_numpy(values).to(device)


def run_many(policy: Policy, layers: list[LayerShape], page_size: int) -> None:
    """Prefill many tokens at once, so that torch.compile tunes its kernels to a large first size."""
    prompts, each = _MANY

    pages = -(-each // page_size)
    shape = layers, prompts * pages, page_size, policy.weights.dtype, policy.device
    cache = PagedCache.make(*shape, states=prompts)
    spans = [(0, each, tuple(range(pages * number, pages * (number + 1)))) for number in range(prompts)]
    with paged(policy):
        step = make_prefill(cache, spans, _sender(policy.device), slots=range(1, prompts + 1))
        run_model(policy, torch.zeros(prompts * each, dtype=torch.int64, device=policy.device), step.positions, step)


def probe_plainly(policy: Policy, layers: list[LayerShape], page_size: int) -> None:
    """`probe`, while no layer is compiled. Experts are then replayed also where the policy's routers cannot be given
    them: by hooks, which compiled code would ignore or keep."""
    if policy.routing is not None and policy.routing.replays:
        probe(policy, layers, page_size)
        return
    ids = _probe_ids(policy)
    with routes_kept(policy.model) as kept:
        passes = _probe_passes(policy, layers, page_size, ids)
    first = _PROBE_CHUNKS[-1]  # from here each token was decoded in two rows, of which one counts
    rows = [*range(first), *range(first, 2 * len(ids) - first, 2)]
    routes = {name: tuple(part[rows] for part in parts) for name, parts in kept.items()}
    with routes_given(policy.model, routes, policy.weights.ranks.place_on("tensor")):
        _compare_passes(policy, ids, passes, None)


def _probe_ids(policy: Policy) -> np.ndarray:
    return np.random.default_rng(0).integers(0, policy.vocabulary_size, _PROBE_TOKENS)


def probe(policy: Policy, layers: list[LayerShape], page_size: int) -> None:
    """Compare the engine's hidden states with those of training on a few tokens. Raise `UnservedError` if they
    differ. Training computes the experts that the engine's tokens had: where a router's scores nearly tie, rounding
    alone decides."""
    ids = _probe_ids(policy)
    chosen: dict[int, list[torch.Tensor]] = defaultdict(list)  # experts of the tokens of each pass, by layer
    with ExitStack() as stack:
        if policy.routing is not None and policy.routing.replays:
            keep: Recorder = lambda layer, index: chosen[layer].append(index.clone())  # noqa: E731
            stack.enter_context(policy.routing.recording(keep))
        passes = _probe_passes(policy, layers, page_size, ids)
    counts = [len(hidden) for hidden in passes]
    routes = [
        torch.cat([index[:count] for index, count in zip(each, counts, strict=True)])
        for _, each in sorted(chosen.items())
    ]
    _compare_passes(policy, ids, passes, torch.stack(routes, dim=1) if routes else None)


def _compare_passes(policy: Policy, ids: np.ndarray, passes: list[torch.Tensor], routes: torch.Tensor | None) -> None:
    """Raise if the hidden states of the engine's passes are not those of training with these experts."""
    # Without context parallelism, because not all context ranks may be sampling. All tensor ranks are, and each has a
    # share of the tokens.
    packed = pack_tokens([ids], policy.weights.ranks.tensor)
    expected = policy.hidden_alone(packed, routes)[: len(ids)]
    worst = float(differences(torch.cat(passes), expected).max())
    allowed = _TOLERANCE.get(policy.weights.dtype, _HALF_TOLERANCE)
    if not worst <= allowed:
        raise UnservedError(f"with the paged KV cache its hidden states differ by {worst:.0e} from those of training")


def _probe_passes(policy: Policy, layers: list[LayerShape], page_size: int, ids: np.ndarray) -> list[torch.Tensor]:
    """Compute the hidden states of tokens as the engine does: two chunks of a prompt, then one token after the other.
    Return those of each pass."""
    device, last = policy.device, len(ids)
    pages = tuple(range(1, 2 + last // page_size))
    cache = PagedCache.make(layers, len(pages) + 1, page_size, policy.weights.dtype, device, states=1)
    tokens = torch.from_numpy(ids).to(device)
    found = []
    with paged(policy):
        start = 0
        for end in _PROBE_CHUNKS:
            step = make_prefill(cache, [(start, end - start, pages)], _sender(device), slots=[1])
            found.append(run_model(policy, tokens[start:end], step.positions, step))
            start = end
        for at in range(start, last):  # two rows: torch.compile specialises for one; the second is not read
            rows = Rows(
                cache,
                pages=torch.tensor([pages[at // page_size], 0], device=device),
                offsets=torch.tensor([at % page_size] * 2, device=device),
                lengths=torch.tensor([at + 1] * 2, device=device),
                table=torch.tensor([pages, (0,) * len(pages)], device=device),
                longest=at + 1,
                attend=attend_rows,
                states=RowStates(cache, torch.tensor([1, 0], device=device)),
            )
            positions = torch.tensor([at] * 2, device=device)
            found.append(run_model(policy, tokens[at].expand(2), positions, rows)[:1])
    return found
