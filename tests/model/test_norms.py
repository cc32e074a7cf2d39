"""The backward pass of norms in one kernel: on a GPU for real, elsewhere in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from documents import make_documents, pack_all
from selection import nightly_except
from truestep.model.fast import fused_attention_gradient as heads
from truestep.model.fast import fused_layers
from truestep.model.fast import rms_norm as norms
from truestep.model.fast.rms_norm import AddingNorm, add_in_norms
from truestep.model.loading.load import load_policy
from truestep.weights.gradient_buffers import enter
from truestep.weights.whole import WholeWeights
from turns import turn

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter does not round to bfloat16
OURS = torch.ops.truestep
DOCUMENTS = make_documents([9, 1, 30, 4], seed=2)
Made = Callable[[str], Path]


@pytest.fixture(autouse=True)
def small_norms_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(norms, "SMALLEST", 4)
    for each in (norms, heads, fused_layers):
        monkeypatch.setattr(each, "kernel_serves", lambda *_: True)
    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def by_loops(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of rows and of the weight, number after number."""
    count = x.shape[1]
    of_rows, of_weight = [], [0.0] * count
    for g, row in zip(gradient.double().tolist(), x.double().tolist(), strict=True):
        scale = 1 / math.sqrt(sum(number * number for number in row) / count + epsilon)
        weighted = [a * (b + offset) for a, b in zip(g, weight.double().tolist(), strict=True)]
        inner = sum(a * b for a, b in zip(weighted, row, strict=True)) / count
        of_rows.append([scale * a - scale**3 * inner * b for a, b in zip(weighted, row, strict=True)])
        of_weight = [total + a * b * scale for total, a, b in zip(of_weight, g, row, strict=True)]
    return torch.tensor(of_rows, dtype=torch.float64), torch.tensor(of_weight, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (7, 5), (50, 40), (3, 300)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_gradients_are_those_of_plain_loops(
    rows: int, width: int, offset: float, dtype: torch.dtype, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from truestep.model.fast import rms_norm_kernel as norm_kernel
    from truestep.model.fast.rms_norm_kernel import backward
    from truestep.weights.sum_kernel import add_up

    monkeypatch.setattr(norm_kernel, "_NARROW", 1000 * narrow)
    gradient, x = (random(rows, width, dtype=dtype, seed=seed) for seed in range(2))
    weight = random(width, dtype=dtype)
    right, of_weight = by_loops(gradient, x, weight, 1e-3, offset)
    near = {"rtol": torch.finfo(dtype).eps, "atol": 2e-6}
    found, parts = backward(gradient, x, weight, 1e-3, offset)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double().cpu(), right, **near)
    total = torch.full((width,), math.nan, device=DEVICE)
    add_up(parts, total, adds=False)
    torch.testing.assert_close(total.double().cpu(), of_weight, rtol=1e-5, atol=1e-5)
    add_up(parts, total, adds=True)
    torch.testing.assert_close(total.double().cpu(), 2 * of_weight, rtol=1e-5, atol=1e-5)


def test_the_check_before_use_passes_and_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.model.fast import rms_norm_kernel as norm_kernel
    from truestep.weights import sum_kernel

    if DEVICE.type == "cpu":
        monkeypatch.setattr(norms, "_SIZES", [(1, 64), (9, 300)])
        monkeypatch.setattr(heads, "_HEADS", [(1, 1, 4), (9, 3, 48)])
    assert norms.wrong_on(DEVICE, HALF) is None
    assert heads.wrong_on(DEVICE, HALF) is None
    honest = norm_kernel.backward
    monkeypatch.setattr(norm_kernel, "backward", lambda *given: honest(*given[:-2], 1e-1, given[-1]))
    assert str(norms.wrong_on(DEVICE, HALF)).startswith("gradients of 1 rows")
    monkeypatch.setattr(norm_kernel, "backward", honest)
    of_heads = norm_kernel.heads_backward_

    def swapped(*given: Any) -> torch.Tensor:
        return of_heads(*given[:4], None if given[4] is None else given[4][::-1], *given[5:])

    monkeypatch.setattr(norm_kernel, "heads_backward_", swapped)
    assert "rotated heads" in str(heads.wrong_on(DEVICE, HALF))
    monkeypatch.setattr(norm_kernel, "heads_backward_", of_heads)
    monkeypatch.setattr(sum_kernel, "add_up", lambda parts, total, adds: total.copy_(parts.sum(0)))
    assert "a weight's gradient over 1 rows" in str(norms.wrong_on(DEVICE, HALF))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (7, 3, 6), (70, 2, 64)])
def test_gradients_of_rotated_heads_are_autograds(tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
    """In float64; written among other columns, which stay as they are."""
    from truestep.model.fast.rms_norm_kernel import heads_backward_
    from truestep.weights.sum_kernel import add_up

    x, gradient = random(tokens, heads, size, dtype=dtype), random(tokens, heads, size, dtype=dtype, seed=1)
    weight, cosine, sine = random(size, dtype=dtype), random(tokens, size, dtype=dtype), random(tokens, size, seed=3)
    wide, exact = x.double().requires_grad_(), weight.double().requires_grad_()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3) * (1 + exact)
    first, second = normed.chunk(2, -1)
    turned = normed * cosine[:, None] + torch.cat([-second, first], -1) * sine.to(dtype)[:, None]
    turned.backward(gradient.double())
    memory = torch.full((tokens, heads * size + 4), 7.0, device=DEVICE, dtype=dtype)
    result = memory[:, 1:-3].unflatten(-1, (heads, size))
    parts = heads_backward_(result, gradient, x, weight, (cosine, sine.to(dtype)), 1e-3, 1.0)
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(result.double(), wide.grad, **near)
    assert (memory[:, :1] == 7).all() and (memory[:, -3:] == 7).all()
    total = torch.zeros(size, device=DEVICE)
    add_up(parts, total, adds=False)
    torch.testing.assert_close(total.double(), exact.grad, rtol=1e-5, atol=1e-4)


class Kept:
    """Keeps the gradients of weights."""

    def __init__(self) -> None:
        self.totals: dict[torch.nn.Parameter, torch.Tensor] = {}

    def add_sum(self, parameter: torch.nn.Parameter, parts: torch.Tensor) -> None:
        self.totals[parameter] = self.totals.get(parameter, torch.zeros(1, device=DEVICE)) + parts.sum(0)


class Scaled(torch.nn.Module):
    """Looks like a norm, and is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().amax(-1, keepdim=True) + self.eps)


class Gated(Scaled):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gate * super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Gemma2RMSNorm])
def test_a_norm_is_known_by_what_it_computes_and_stays_what_it_was(kind: Any, dtype: torch.dtype) -> None:
    """Number for number, also where a kind of norm rounds at another place."""
    norm, plain = kind(96, eps=1e-5).to(DEVICE), kind(96, eps=1e-5).to(DEVICE)
    for each in (norm, plain):
        each.weight.data = random(96, dtype=dtype)
    kept = Kept()
    add_in_norms([norm], kept, [norm.weight])
    assert isinstance(norm, AddingNorm) and isinstance(norm, kind) and type(norm).__name__ == kind.__name__
    x = random(4, 3, 96, dtype=dtype).requires_grad_()
    assert torch.equal(norm(x), plain(x))
    with torch.no_grad():
        assert torch.equal(norm(x), plain(x))
    norm(x).float().sin().sum().backward()
    found, x.grad = x.grad, None
    plain(x).float().sin().sum().backward()
    rough = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found, x.grad, **rough)
    assert norm.weight.grad is None
    of_weight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.03}
    torch.testing.assert_close(kept.totals[norm.weight], plain.weight.grad.float(), **of_weight)
    with torch.no_grad():
        assert torch.equal(norm(hidden_states=x) if kind is not Gemma2RMSNorm else norm(x=x), plain(x))


class Otherwise(LlamaRMSNorm):
    """Has epsilon at another place, or another epsilon: of rows that are not small it gives nearly the same."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__(width, eps=1e-6)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, epsilon = x.float(), self.variance_epsilon
        square = wide.pow(2).mean(-1, keepdim=True)
        if self.how == "behind the root":
            normed = wide / (square.sqrt() + epsilon)
        elif self.how == "least":
            normed = wide * torch.rsqrt(square.clamp(min=epsilon))
        else:
            normed = wide * torch.rsqrt(square + {"none": 0, "another": 1e-5}[self.how])
        return self.weight * normed.to(x.dtype)


class Two(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


OTHERS = [
    Scaled(8),
    Gated(8),
    torch.nn.LayerNorm(8, bias=False),
    torch.nn.LayerNorm(8),
    torch.nn.RMSNorm(8, 1e-6),
    Two(8),
]


@pytest.mark.parametrize(
    "module", [*OTHERS, *(Otherwise(how, 1024) for how in ("behind the root", "least", "none", "another"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_module_is_left_alone(module: Any, dtype: torch.dtype) -> None:
    before = type(module)
    module.to(dtype)
    add_in_norms([module, torch.nn.Identity()], Kept(), [module.weight])
    assert type(module) is before


def test_gradients_go_to_memory_that_is_given_anew() -> None:
    """A step's first part is written to it, the others are added."""
    layer = Layer().to(DEVICE)
    weights = WholeWeights(layer, HALF)
    weights.moved_beside(lambda: None)
    add_in_norms(layer.modules(), weights, weights.rounded)
    found = []
    for passes in (1, 1, 3):
        weights.zero_gradients()
        for _ in range(passes):
            layer(random(1, 5, 12, dtype=HALF).requires_grad_()).float().sin().sum().backward()
        found.append(torch.cat([gradient.clone() for gradient in weights.gradients.values()]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], 3 * found[0], rtol=1e-4, atol=1e-4)


class Layer(torch.nn.Module):
    """A norm beside its rows, one whose rows go on alone, and one that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice = (LlamaRMSNorm(12) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(self.first(x).sin())
        return self.twice(x) + self.twice(x * 1.5) + self.twice(x)


@pytest.mark.parametrize("backend", nightly_except(["aot_eager", "inductor"], "aot_eager"))
def test_norms_of_compiled_layers_have_the_gradients_of_float64(backend: str) -> None:
    """Equal ones too: a compiler takes equal operations for one, and would add what they add once."""
    layer, exact, kept = Layer().to(DEVICE), Layer().double().to(DEVICE), Kept()
    for seed, (parameter, double) in enumerate(zip(layer.parameters(), exact.parameters(), strict=True)):
        parameter.data = random(12, seed=seed)
        double.data = parameter.data.double()
    add_in_norms(layer.modules(), kept, layer.parameters())
    run = torch.compile(layer.forward, dynamic=True, backend=backend)
    for tokens in (5, 9):
        kept.totals.clear()
        exact.zero_grad()
        x = random(1, tokens, 12).requires_grad_()
        wide = x.detach().double().requires_grad_()
        run(x).sin().sum().backward()
        exact(wide).sin().sum().backward()
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)
        for parameter, double in zip(layer.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(kept.totals[parameter].double(), double.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "backend", "recompute"),
    [
        ("qwen3_tied", "inductor", False),
        ("gemma2", "aot_eager", True),
        ("qwen3_tied", "aot_eager", "elementwise"),
        ("llama", None, True),
    ],
)
def test_a_policys_norms_are_ours(
    kind: str, backend: str | None, recompute: bool | str, tiny_model: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every norm, but of layers that make them again beside their gradients."""
    monkeypatch.setattr("truestep.model.fast.compiled.BACKEND", backend or "eager")
    compiled = backend is not None
    exact = load_policy(tiny_model(kind), activation_checkpointing=recompute)
    policy = load_policy(tiny_model(kind), dtype="bfloat16", activation_checkpointing=recompute, compiled=compiled)
    changed = {f"{name}.weight" for name, module in policy.model.named_modules() if isinstance(module, AddingNorm)}
    every = {f"{name}.weight" for name, _ in policy.model.named_modules() if name.endswith("norm")}
    kernels = {name for name in every if "q_norm" in name or "k_norm" in name or name == "model.norm.weight"}
    assert changed == (kernels if recompute == "elementwise" else every) and len(every) > 4
    told, add_sum = list[str](), WholeWeights.add_sum
    names = {parameter: name for name, parameter in policy.model.named_parameters()}

    def add(weights: WholeWeights, parameter: torch.nn.Parameter, parts: torch.Tensor) -> None:
        told.append(names[parameter])
        add_sum(weights, parameter, parts)

    monkeypatch.setattr(WholeWeights, "add_sum", add)
    for each in (exact, policy):
        each.weights.zero_gradients()
        for documents in (DOCUMENTS, DOCUMENTS[1:3]):
            hidden = each.hidden(pack_all(documents).tokens)
            (hidden.float() * torch.linspace(-1, 1, hidden.shape[1], device=hidden.device)).sum().backward()
    assert sorted(told) == sorted([*changed, *changed])
    found, expected = policy.weights.gradients, exact.weights.gradients
    for name in changed:
        assert float((found[name] - expected[name]).norm() / expected[name].norm()) < 0.05, name


HEADS, KEYS, SIZE, WIDTH = 3, 1, 4, 8


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("form", range(len(norms.FORMS)))
def test_heads_and_their_gradients_are_autograds(form: int, dtype: torch.dtype) -> None:
    """Queries, keys and values, with norms and RoPE, in one function. In float64, of every weight that has a part."""
    matrices = [random(count * SIZE, WIDTH, dtype=dtype, seed=count) for count in (HEADS, KEYS, KEYS)]
    weights = [torch.nn.Parameter(w) for w in (*matrices, random(SIZE, dtype=dtype), random(SIZE, dtype=dtype, seed=1))]
    sums = Totals()
    numbers = torch.stack([enter(sums, weight) for weight in weights])
    x, cosine, sine = (random(1, 5, size, dtype=dtype, seed=size) for size in (WIDTH, SIZE, SIZE))
    x.requires_grad_()
    epsilons = [0.1, 0.2]
    given = [weight.detach() for weight in weights]
    found = heads.heads_of(x, cosine, sine, numbers, epsilons, form, *given)
    wide, *exact = (tensor.detach().double().requires_grad_() for tensor in (x, *weights))
    expected = []
    for matrix, norm, epsilon in zip(exact[:3], (*exact[3:], None), (*epsilons, 0.0), strict=True):
        made = (wide @ matrix.T).unflatten(-1, (-1, SIZE))
        if norm is not None:
            scale = torch.rsqrt(made.square().mean(-1, keepdim=True) + epsilon)
            made = made * scale * (norm + float(form == norms.FROM_ONE))
        made = made.transpose(1, 2)
        expected.append(made if norm is None else turn("", made, cosine.double()[:, None], sine.double()[:, None]))
    gradients = [random(*part.shape, dtype=dtype, seed=7) for part in expected]
    near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 32 * torch.finfo(dtype).eps}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, **near)
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    for one, other in ((x.grad, wide.grad), *((sums.totals[w], e.grad) for w, e in zip(weights, exact, strict=True))):
        assert float((one.double() - other).norm() / other.norm()) < 16 * torch.finfo(dtype).eps


class Totals(Kept):
    def add_product(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        self.totals[parameter] = gradient.float().T @ rows.float()
