"""FlashAttention 4 in training, as far as it shows without a GPU: the operators with a plain kernel in the package's
place, what is chosen and why, and one graph for a compiled layer. tests/test_gpu.py has the real kernel."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor import config as inductor

from selection import in_tiers
from truestep.model.fast.compiled import compile_layers
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention, flash
from truestep.model.mixers.paths import make_paths
from truestep.rollouts.packing import pack_tokens
from truestep.rollouts.prefixes import find_segments
from truestep.weights.errors import ModelError

CPU = torch.device("cpu")
SHAPES = [
    flash.Heads(4, 2, 16, 16, 0.25),
    flash.Heads(4, 4, 16, 8, 0.1),
    flash.Heads(4, 2, 16, 16, 0.25, window=5),
    flash.Heads(4, 1, 16, 16, 0.25, window=7, softcap=3.0),
]


def loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: list[int],
    key_bounds: list[int],
    scale: float,
    left: int | None,
    softcap: float,
) -> torch.Tensor:
    """Attention one query and one head at a time. Queries are the last of their segment's keys."""
    group, rows = q.shape[1] // k.shape[1], []
    for (start, end), (begin, stop) in zip(itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True):
        for i in range(start, end):
            last = stop - (end - i)
            seen = slice(begin if left is None else max(begin, last - left), last + 1)
            heads = []
            for head in range(q.shape[1]):
                scores = (k[seen, head // group] @ q[i, head]) * scale
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                heads.append(scores.softmax(0) @ v[seen, head // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def bounds_of(options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The bounds that the package's functions are given, of queries and of keys."""
    found = []
    for name in ("q", "k"):
        bounds = options[f"cu_seqlens_{name}"].tolist()
        assert options[f"max_seqlen_{name}"] == max(b - a for a, b in itertools.pairwise(bounds))
        found.append(bounds)
    return found[0], found[1]


def forward(q: Any, k: Any, v: Any, *, softcap: float, return_lse: bool, **options: Any) -> tuple[Any, ...]:
    """What the package's function is asked for, by the loop; its logsumexp is not looked at."""
    dtype = q.dtype
    assert return_lse and options["causal"]
    q, k, v = (tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in (q, k, v))
    output = loop(q, k, v, *bounds_of(options), options["softmax_scale"], options["window_size_left"], softcap)
    return output.to(dtype), torch.zeros(q.shape[1], q.shape[0]), None, None, None


def backward(
    q: Any, k: Any, v: Any, output: Any, gradient: Any, logsumexp: Any, *, softcap: float, **options: Any
) -> tuple[Any, ...]:
    assert output.shape == gradient.shape and logsumexp.shape == (q.shape[1], q.shape[0])
    assert options["deterministic"] == torch.are_deterministic_algorithms_enabled()

    def gradients() -> tuple[torch.Tensor, ...]:
        wide = [tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in (q, k, v)]
        inputs = [tensor.detach().requires_grad_() for tensor in wide]
        again = loop(*inputs, *bounds_of(options), options["softmax_scale"], options["window_size_left"], softcap)
        return tuple(found.to(q.dtype) for found in torch.autograd.grad(again, inputs, gradient.to(again.dtype)))

    with ThreadPoolExecutor(1) as elsewhere:  # inside an operator, this thread records no graph
        return elsewhere.submit(gradients).result()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package in the place of flash-attn-4, whose two functions are plain loops."""
    interface: Any = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    flash._compared.cache_clear()
    yield interface
    flash._compared.cache_clear()


@pytest.mark.parametrize("heads", SHAPES)
def test_the_check_passes_what_is_right(heads: flash.Heads, package: ModuleType) -> None:
    assert flash.compare(heads, torch.bfloat16, CPU, flash.attend) is None


def a_window_too_wide(*given: Any) -> Any:
    *rest, window, softcap, sinks, paths = given
    return flash.attend(*rest, None if window is None else window + 1, softcap, sinks, paths)


def no_softcap(*given: Any) -> Any:
    *rest, _, sinks, paths = given
    return flash.attend(*rest, None, sinks, paths)


def a_neighbour_seen(q: Any, k: Any, v: Any, bounds: torch.Tensor, longest: int, *rest: Any) -> Any:
    joined = torch.cat([bounds[:1], bounds[2:]])
    return flash.attend(q, k, v, joined, int((joined[1:] - joined[:-1]).max()), *rest)


def no_gradient_of_keys(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return flash.attend(q, k.detach() + 0 * k, v, *rest)


def a_prefix_unseen(*given: Any) -> Any:
    return flash.attend(*given[:-1], None)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (a_window_too_wide, "values"),
        (no_softcap, "values"),
        (a_neighbour_seen, "values"),
        (no_gradient_of_keys, "dk"),
        (a_prefix_unseen, "values"),
    ],
)
def test_the_check_names_what_is_wrong(fault: Callable[..., Any], named: str, package: ModuleType) -> None:
    said = flash.compare(SHAPES[3], torch.bfloat16, CPU, fault)
    assert said is not None and said.startswith(f"its {named} are off by")
    assert ("with shared prefixes" in said) == (fault is a_prefix_unseen)


@pytest.mark.nightly
@pytest.mark.parametrize("heads", [SHAPES[0], *(pytest.param(each, marks=pytest.mark.release) for each in SHAPES[1:])])
def test_operators_keep_what_torch_asks_of_them(heads: flash.Heads, package: ModuleType) -> None:
    bounds = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    q, k, v = (
        torch.randn(9, count, size, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads.queries, heads.size), (heads.keys, heads.size), (heads.keys, heads.value_size))
    )
    paths = make_paths(((0, 3), (3, 4), (4, 9)), (-1, 0, 1), CPU)
    for along in ([], [paths.bounds, *paths.index]):
        given = (q, k, v, bounds, 5, heads.scale, heads.window, heads.softcap or 0.0, None, along, paths.longest)
        torch.library.opcheck(flash._attend, given, test_utils=("test_schema", "test_autograd_registration"))
        torch.autograd.gradcheck(lambda *tensors, rest=given[3:]: flash._attend(*tensors, *rest)[0], (q, k, v))


def test_without_a_gpu_torch_attends(tiny_model: Callable[[str], Path]) -> None:
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    assert policy.attends == attention.AttentionKernel(attention.NAME, "it needs a GPU")
    assert policy.attends.story == "torch's own; FlashAttention 4 is not used: it needs a GPU"
    assert policy.model.config._attn_implementation == attention.NAME
    with pytest.raises(ModelError, match=r"model\.attention: flash cannot be used: it needs a GPU"):
        load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu", attending="flash")


def test_torch_is_what_attends_where_it_is_asked_for(
    tiny_model: Callable[[str], Path], package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the package is there, and serves."""
    called: list[str] = []
    monkeypatch.setattr(flash, "problem", lambda *_: None)
    monkeypatch.setattr(
        package, "_flash_attn_fwd", lambda *given, **options: called.append("forward") or forward(*given, **options)
    )
    for attending in ("torch", "auto"):
        called.clear()
        policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu", attending=attending)
        policy.hidden(pack_tokens([torch.arange(9)]))
        assert bool(called) == (attending == "auto"), attending


def test_a_model_that_uses_it_uses_it_again_after_sampling(
    tiny_model: Callable[[str], Path], package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[flash.Heads, ...]] = []
    monkeypatch.setattr(flash, "problem", lambda shapes, *_: asked.append(shapes))
    monkeypatch.setattr(flash, "version", lambda: "4")
    policy = load_policy(tiny_model("gemma2"), dtype="bfloat16", device="cpu")
    assert policy.attends.name == attention.FLASH
    assert {(heads.window is None, heads.softcap is None) for heads in asked[0]} == {(True, False), (False, False)}
    with policy.plain_attention():
        assert policy.model.config._attn_implementation == "eager"
    assert policy.model.config._attn_implementation == attention.FLASH


def test_what_the_probe_refuses_is_not_used(
    tiny_model: Callable[[str], Path], package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that passed its check and is wrong in the model all the same."""
    monkeypatch.setattr(flash, "problem", lambda *_: None)
    package._flash_attn_fwd = lambda *given, **options: (given[0] * 3, *forward(*given, **options)[1:])
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    assert policy.attends.name == attention.NAME
    assert "packed in half precision gives other values" in str(policy.attends.instead)
    with pytest.raises(ModelError, match="packed in half precision gives other values"):
        load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu", attending="flash")


def test_a_compiled_layer_is_one_graph_for_any_packing(
    tiny_model: Callable[[str], Path], package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "problem", lambda *_: None)
    monkeypatch.setattr("truestep.model.fast.compiled.BACKEND", "aot_eager")
    torch._dynamo.reset()
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    plain = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu", attending="torch")
    compile_layers(policy.model.model.layers)
    counted = torch._dynamo.utils.counters
    counted.clear()
    for lengths in ((9, 4), (3, 8, 5, 12), (30,), (7, 7, 7, 7, 7)):
        tokens = pack_tokens([torch.arange(length) % 61 for length in lengths])
        found, right = policy.hidden(tokens), plain.hidden(tokens)
        torch.testing.assert_close(found, right, rtol=0.05, atol=0.05)
        found.float().square().sum().backward()
    assert counted["stats"]["unique_graphs"] <= 2, "the first compilation and one of any size, whichever the packing"
    assert not counted["graph_break"], dict(counted["graph_break"])


def test_no_tree_of_shared_prefixes_compiles_a_layer_again(
    tiny_model: Callable[[str], Path], package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "problem", lambda *_: None)
    monkeypatch.setattr("truestep.model.fast.compiled.BACKEND", "aot_eager")
    torch._dynamo.reset()
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", device="cpu")
    compile_layers(policy.model.model.layers)
    counted = torch._dynamo.utils.counters
    counted.clear()
    found = []
    for prefix, answers in ((5, (2, 3)), (9, (4, 1, 6)), (3, (3,)), (12, (2, 2, 2, 2)), (7, (5, 8)), (4, (1, 9, 3))):
        documents = [np.arange(prefix + answer) % 61 for answer in answers]
        documents = [np.where(np.arange(len(own)) < prefix, own, own + n) for n, own in enumerate(documents)]
        tokens = pack_tokens(documents, 1, find_segments(documents))
        policy.hidden(tokens).float().square().sum().backward()
        found.append(counted["stats"]["unique_graphs"])
    assert found[-1] == found[2] <= 4, found


def gradients_of(policy: Any) -> dict[str, torch.Tensor]:
    policy.weights.zero_gradients()
    policy.hidden(pack_tokens([torch.arange(19) % 61, torch.arange(12)])).float().square().sum().backward()
    return {name: gradient.float().clone() for name, gradient in policy.weights.gradients.items()}


@pytest.mark.parametrize(
    ("kind", "normed"), in_tiers([("qwen3_tied", 0), ("gemma2", 1)], [], [("qwen3_tied", 0)], "nightly")
)
def test_elementwise_recomputation_keeps_what_products_and_attention_give(
    kind: str, normed: int, tiny_model: Callable[[str], Path], package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In compiled layers, by torch's own compiler: norms, rotated queries and keys and the MLP's activation are made
    again, and gradients are no further from float32's than a plain layer's. Gemma 2 has a norm of what the MLP gives,
    which is kept too."""
    exact = gradients_of(load_policy(tiny_model(kind), device="cpu"))
    monkeypatch.setattr(flash, "problem", lambda *_: None)
    plain = gradients_of(load_policy(tiny_model(kind), dtype="bfloat16", device="cpu"))
    torch._dynamo.reset()
    kept: dict[int, torch.Tensor] = {}
    with inductor.patch(force_disable_caches=True):
        policy = load_policy(
            tiny_model(kind), dtype="bfloat16", device="cpu", compiled=True, activation_checkpointing="elementwise"
        )
        own = {weight.untyped_storage()._cdata for weight in policy.model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage()._cdata not in own and tensor.dtype == torch.bfloat16:
                kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = gradients_of(policy)
    torch._dynamo.reset()
    for name, right in exact.items():
        off, before = (float((one[name] - right).norm() / right.norm()) for one in (found, plain))
        assert off < 1.5 * before + 1e-3, name
    text = policy.model.config
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    layer = (2 + normed) * text.hidden_size + 2 * queries + 2 * keys + 2 * text.intermediate_size
    numbers = sum(tensor.untyped_storage().nbytes() // 2 for tensor in kept.values()) / 31
    assert numbers <= text.num_hidden_layers * layer + 2 * text.hidden_size, "beside layers: angles, the last output"
