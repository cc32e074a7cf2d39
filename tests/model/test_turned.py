"""Queries and keys that are normed and turned by one kernel while a model samples: on a GPU for real, elsewhere in
Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from truestep.generate.engine.forward import compiled_layers, probe, shapes_of
from truestep.model.fast import qk_norm_rope as turned
from truestep.model.fast.fused_products_compiler import Join, sampling_backend
from truestep.model.loading.load import load_policy
from turns import turn

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter does not round to bfloat16
TURNED = torch.ops.truestep.turned_heads.default


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The heads of each operator in the graphs that are compiled."""
    found: list[list[int]] = []
    join = Join.__call__

    def told(self: Join, graph: torch.fx.Graph) -> None:
        join(self, graph)
        graph.lint()
        found.extend(list(node.args[1]) for node in graph.nodes if node.target is TURNED)

    monkeypatch.setattr(Join, "__call__", told)
    return found


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_check_before_use_passes_and_finds_faults(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.model.fast import qk_norm_rope_kernel as turned_kernel

    assert turned.wrong_on(DEVICE, dtype) is None
    honest = turned_kernel.turn

    def other_way(rows: Any, heads: Any, weights: Any, epsilons: Any, offset: Any, cosine: Any, sine: Any) -> Any:
        return honest(rows, heads, weights, epsilons, offset, cosine, -sine)

    def mixed(rows: Any, heads: Any, weights: Any, *given: Any) -> Any:
        return honest(rows, heads, weights[::-1], *given)

    for fault in (other_way, mixed):
        monkeypatch.setattr(turned_kernel, "turn", fault)
        assert "heads of" in str(turned.wrong_on(DEVICE, dtype))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_kernel_is_a_plain_loop(offset: float) -> None:
    from truestep.model.fast.qk_norm_rope_kernel import turn

    generator = torch.Generator().manual_seed(0)
    rows, cosine, sine, *weights = (
        torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((5, 30), (5, 6), (5, 6), (6,), (6,))
    )
    found = turn(rows, [3, 1], weights, [0.1, 0.4], offset, cosine, sine).tolist()
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


class Heads(torch.nn.Module):
    """Queries and keys are turned, values are not. `how` another model does it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(8, size, bias=False) for size in (12, 8, 8))
        kind: Any = Gemma2RMSNorm if how == "from one" else LlamaRMSNorm
        self.q_norm, self.k_norm = (kind(4, eps=epsilon) for epsilon in (0.05, 0.2))
        self.how = how

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (product(x).view(1, -1, product.out_features // 4, 4) for product in (self.q, self.k, self.v))
        if self.how != "bare":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (part.transpose(1, 2) for part in (q, k))
        turned = [turn(self.how, part, cosine[:, None], sine[:, None]) for part in (q, k)]
        read = (k * 1.0,) if self.how == "read" else ()
        return *turned, v.transpose(1, 2), *read


HOWS = {"as it is": [3, 2], "other order": [3, 2], "from one": [3, 2], "bare": [3, 2], "read": [3], "pairs": None}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [*HOWS, "backwards"])
def test_heads_are_known_by_what_they_compute(how: str, dtype: torch.dtype, seen: list[list[int]]) -> None:
    torch.manual_seed(0)
    layer = Heads(how).to(DEVICE, dtype).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn_like(parameter))
    exact = Heads(how).double().to(DEVICE).requires_grad_(False)
    exact.load_state_dict(layer.state_dict())
    run = torch.compile(layer.forward, backend=sampling_backend("inductor"), dynamic=True)
    with torch.no_grad():
        for tokens in (5, 9):
            given = [torch.randn(1, tokens, size, device=DEVICE).to(dtype) for size in (8, 4, 4)]
            right = exact(*(tensor.double() for tensor in given))
            near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.06}
            for found, expected in zip(run(*given), right, strict=True):
                torch.testing.assert_close(found.double(), expected, **near)
    heads = HOWS.get(how)
    assert [one for one, _ in itertools.groupby(seen)] == ([] if heads is None else [heads])


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["qwen3_tied", *(pytest.param(k, marks=pytest.mark.release) for k in ("llama", "gemma2"))]
)
@pytest.mark.long
def test_models_that_sample_turn_their_heads_so(
    kind: str, tiny_model: Callable[[str], Path], seen: list[list[int]]
) -> None:
    """And their hidden states are training's."""
    policy = load_policy(tiny_model(kind))
    with torch.no_grad():
        layers = shapes_of(policy)
        with compiled_layers(policy.model, {}):
            probe(policy, layers, 4)
    assert seen and all(len(heads) == 2 for heads in seen)
