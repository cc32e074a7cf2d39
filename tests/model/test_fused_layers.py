"""Fused attention and MLP: which modules are replaced, the norm and RoPE kernel (on a GPU for real, elsewhere in
Triton's interpreter), and what compiled layers compute while a model samples and trains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM

from selection import in_tiers
from truestep.generate.engine.forward import compiled_layers, probe, shapes_of
from truestep.model.exact import exactly
from truestep.model.fast import compiled, fused_attention, rope
from truestep.model.fast.fused_attention import FusedAttention, fuse_attention
from truestep.model.fast.fused_mlp import FusedMLP, fuse_mlp
from truestep.model.fast.fused_products import as_one
from truestep.model.fast.gradient_accumulation import AddingLinear, add_in_products, product, products
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.rollouts.packing import pack_tokens
from truestep.weights.whole import WholeWeights
from turns import turn

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter does not round to bfloat16
Made = Callable[[str], Path]


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_check_before_use_passes_and_finds_faults(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from truestep.model.fast import rope_kernel

    assert rope.wrong_on(DEVICE, dtype) is None
    honest = rope_kernel.norm_rope

    def other_way(rows: Any, heads: Any, weights: Any, epsilons: Any, offset: Any, cosine: Any, sine: Any) -> Any:
        return honest(rows, heads, weights, epsilons, offset, cosine, -sine)

    def mixed(rows: Any, heads: Any, weights: Any, *given: Any) -> Any:
        return honest(rows, heads, weights[::-1], *given)

    for fault in (other_way, mixed):
        monkeypatch.setattr(rope_kernel, "norm_rope", fault)
        assert "heads of" in str(rope.wrong_on(DEVICE, dtype))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kernel", [True, False])
def test_norm_and_rope_are_a_plain_loop(offset: float, kernel: bool) -> None:
    if kernel:
        pytest.importorskip("triton")
        from truestep.model.fast.rope_kernel import norm_rope
    else:
        norm_rope = rope.norm_rope_plainly
    generator = torch.Generator().manual_seed(0)
    rows, cosine, sine, *weights = (
        torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((5, 30), (5, 6), (5, 6), (6,), (6,))
    )
    found = norm_rope(rows, [3, 1], weights, [0.1, 0.4], offset, cosine, sine).tolist()
    for token in range(5):
        c, s = cosine[token].tolist(), sine[token].tolist()
        for head in range(4):
            own = rows[token, 6 * head : 6 * head + 6].tolist()
            weight = [number + offset for number in weights[head == 3].tolist()]
            scale = 1 / math.sqrt(sum(number * number for number in own) / 6 + (0.4 if head == 3 else 0.1))
            h = [number * scale * factor for number, factor in zip(own, weight, strict=True)]
            right = [h[i] * c[i] - h[i + 3] * s[i] for i in range(3)]
            right += [h[i] * c[i] + h[i - 3] * s[i] for i in range(3, 6)]
            assert found[token][head] == pytest.approx(right, rel=1e-5, abs=1e-6)


class Config:
    _attn_implementation = fused_attention.RECORD


class Attention(torch.nn.Module):
    """An attention as transformers has it, or one that differs in one thing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 12, bias=how == "bias")
        self.k_proj, self.v_proj = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.o_proj = torch.nn.Linear(12, 8, bias=False)
        self.config, self.head_dim, self.how = Config(), 4, how

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, **named: Any) -> Any:
        x, turns = hidden_states, [part[:, None] for part in position_embeddings]
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (turn(self.how, part, *turns) for part in (q, k))
        v = v * 1.5 if self.how == "values" else v
        mask = torch.ones(1) if self.how == "mask" else attention_mask
        extra = {"sinks": torch.ones(3)} if self.how == "tensor" else {"softcap": 3.0}
        found, _ = fused_attention._record(self, q, k, v, mask, scaling=0.5, **extra, **named)
        found = self.o_proj(found.flatten(2))
        return (found + x if self.how == "output" else found), None


SAME = {"": True, "other order": True, "bias": True}
OTHER = ("pairs", "backwards", "values", "mask", "tensor", "output")


@pytest.mark.parametrize("how", [*SAME, *OTHER])
def test_an_attention_is_replaced_if_it_computes_the_same(how: str) -> None:
    module = Attention(how)
    fuse_attention(module)
    assert isinstance(module, FusedAttention) == SAME.get(how, False)
    assert isinstance(module, Attention) and type(module).__name__ == "Attention"
    if isinstance(module, FusedAttention):
        assert module.constants == {"scaling": 0.5, "softcap": 3.0}
        assert module.joins == (how != "bias")


class MLP(torch.nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(6, 10, bias=how == "bias") for _ in range(2))
        self.down_proj, self.act_fn, self.how = torch.nn.Linear(10, 6, bias=False), torch.nn.SiLU(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate, up = (up, gate) if self.how == "swapped" else (gate, up)
        return self.down_proj(self.act_fn(gate) * up) * (2 if self.how == "scaled" else 1)


@pytest.mark.parametrize("how", ["", "bias", "swapped", "scaled"])
def test_an_mlp_is_replaced_if_it_computes_the_same(how: str) -> None:
    module = MLP(how)
    fuse_mlp(module)
    assert isinstance(module, FusedMLP) == (not how)


def test_every_layer_of_a_model_is_replaced_and_its_names_stay(tiny_model: Made) -> None:
    policy = load_policy(tiny_model("gemma2"))
    layers = policy.model.base_model.layers
    assert all(isinstance(layer.self_attn, FusedAttention) and isinstance(layer.mlp, FusedMLP) for layer in layers)
    assert [layer.self_attn.constants["sliding_window"] for layer in layers] == [5, None]
    plain = AutoModelForCausalLM.from_pretrained(policy.path)
    assert dict(policy.model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert policy.model.state_dict().keys() == plain.state_dict().keys()


SAMPLING = [(kind, dtype) for kind in ("qwen3_tied", "llama", "gemma2", "qwen2") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), in_tiers(SAMPLING, [], [("qwen3_tied", "float32")], "nightly"))
def test_models_that_sample_are_fused(kind: str, dtype: str, tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their hidden states are training's, which `probe` compares."""
    policy = load_policy(tiny_model(kind), dtype=dtype)
    calls = list[int]()
    honest = FusedAttention.sampled_heads

    def told(self: Any, *given: Any) -> Any:
        calls.append(0)
        return honest(self, *given)

    monkeypatch.setattr(FusedAttention, "sampled_heads", told)
    with torch.no_grad():
        layers = shapes_of(policy)
        assert not calls, "outside of compiled code the model's own runs"
        with compiled_layers(policy.model, {}):
            probe(policy, layers, 4)
    assert bool(calls) == (kind != "qwen2"), "Qwen 2's products have biases"


class Three(torch.nn.Module):
    """Three products of one input, and a product of what they make."""

    def __init__(self, splits: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(6, size, bias=False) for size in (8, 4, 3))
        self.back, self.splits = torch.nn.Linear(15, 6, bias=False), splits
        self.numbers: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, inner = x * 1.5, (self.q, self.k, self.v)
        if self.numbers is None:
            (q, k, v), empty = (layer(x) for layer in inner), None
        else:
            q, k, v, empty = products(x, self.numbers, *(layer.weight.detach() for layer in inner))
        rows = torch.cat([q.sin(), k * v.sum(-1, keepdim=True), v.exp()], -1)
        return self.back(rows, empty) if self.splits and empty is not None else self.back(rows)


def results(layer: Any, run: Any, weights: WholeWeights) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 5 * 6).view(1, 5, 6).to(weights.dtype).requires_grad_()
    weights.zero_gradients()
    for _ in range(2):
        result = run(x)
        result.backward(torch.linspace(1, 2, 30).view(1, 5, 6).to(weights.dtype))
    assert x.grad is not None
    return [result.detach(), x.grad, *weights.gradients.values()]


CASES = [("", False), ("", True), *(pytest.param("compiled", s, marks=pytest.mark.nightly) for s in (False, True))]


@pytest.mark.parametrize(("how", "splits"), CASES)
def test_products_of_one_input_have_the_gradients_of_single_ones(how: str, splits: bool) -> None:
    torch.manual_seed(0)
    layer, exact = Three(splits), Three(splits).double()
    weights = WholeWeights(layer, torch.bfloat16)
    exact.load_state_dict({name: parameter.double() for name, parameter in layer.named_parameters()})
    add_in_products([layer], weights, weights.rounded)
    inner = [layer.q, layer.k, layer.v]
    assert as_one([each.weight for each in inner]) is not None, "they lie one behind another"
    plain = results(layer, layer, weights)
    layer.numbers = torch.stack([each.number for each in inner])  # type: ignore[misc]
    run: Any = layer
    if how:
        from truestep.model.fast.compiler_backends import recomputing_backend

        run = torch.compile(layer.forward, backend=recomputing_backend("inductor"), dynamic=True)
    found = results(layer, run, weights)
    right = results(exact, exact, WholeWeights(exact, torch.float64))
    for mine, theirs, true in zip(found, plain, right, strict=True):
        off, before = (float((one.double() - true).norm() / true.norm()) for one in (mine, theirs))
        assert off < 2e-2 and off < 1.3 * before + 1e-3, "no further from float64 than single products are"


def test_a_weights_gradient_is_added_just_before_those_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    weights = {name: torch.nn.Parameter(torch.randn(4, 4)) for name in ("first", "second", "last")}
    names = {parameter: name for name, parameter in weights.items()}

    class Owner:
        def add_product(self, parameter: torch.nn.Parameter, *_: torch.Tensor) -> None:
            told.append(names[parameter])

    from truestep.weights.gradient_buffers import enter

    owner = Owner()
    first, second, last = (enter(owner, weight) for weight in weights.values())
    x = torch.randn(1, 3, 4, requires_grad=True)
    given = [weight.detach() for weight in weights.values()]
    one, other, empty = products(x, torch.stack([first, second]), *given[:2])
    product(one * other, given[2], last, empty).sum().backward()
    assert told == ["last", "first", "second"]


KINDS = ["qwen3_tied", pytest.param("gemma2", marks=pytest.mark.release)]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_models_layers_are_joined(kind: str, tiny_model: Made) -> None:
    """Their gradients are no further from float32's than those of plain layers."""
    results = []
    for dtype, how in (("float32", None), ("bfloat16", None), ("bfloat16", False), ("bfloat16", "elementwise")):
        given: dict[str, Any] = {} if how is None else {"compiled": True, "activation_checkpointing": how}
        policy = load_policy(tiny_model(kind), dtype=dtype, device="cpu", **given)
        policy.weights.zero_gradients()
        policy.hidden(pack_tokens([torch.arange(90) % 7, torch.arange(40)])).float().square().sum().backward()
        results.append({name: gradient.clone() for name, gradient in policy.weights.gradients.items()})
    exact, plain, *found = results
    for (name, right), kept in itertools.product(exact.items(), found):
        off, before = (float((one[name] - right).norm() / right.norm()) for one in (kept, plain))
        assert off < 1.5 * before + 1e-3, name
    for layer in policy.model.base_model.layers:
        assert isinstance(layer.self_attn.q_proj, AddingLinear) and layer.self_attn.numbers is not None
        assert as_one([each.weight for each in layer.self_attn.inner]) is not None
        assert as_one([each.weight for each in layer.mlp.inner]) is not None and layer.mlp.numbers is not None


def test_exact_passes_run_the_models_own_code(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its single operations are replaced, and a fused product would hide in one of ours."""
    policy = load_policy(tiny_model("llama"))
    mlp = policy.model.base_model.layers[0].mlp
    fused = list[Any]()
    monkeypatch.setattr(FusedMLP, "middle", lambda self, gate, up: fused.append(0) or self.act_fn(gate) * up)
    x = torch.randn(1, 3, mlp.gate_proj.in_features)
    with torch.no_grad():
        for runs_own in (True, False):
            torch._dynamo.reset()
            run = torch.compile(type(mlp).forward, backend="eager")
            if runs_own:
                with exactly(policy.model):
                    run(mlp, x)
                assert not fused
            else:
                run(mlp, x)
                assert fused


def test_backends_are_the_same_object_each_time_and_others_stay() -> None:
    from truestep.model.fast.compiler_backends import recomputing_backend, rounding_backend

    for backend in (recomputing_backend, rounding_backend):
        assert backend("eager") == "eager"
        assert backend("inductor") is backend("inductor") != "inductor"
    assert compiled.BACKEND == "inductor"


def test_the_recording_attention_is_switched_off_again(tiny_model: Made) -> None:
    policy = load_policy(tiny_model("llama"))
    assert policy.model.config._attn_implementation == attention.NAME
