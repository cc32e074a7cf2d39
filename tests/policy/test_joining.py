"""The gradient of rows that several products have: one product in training's backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from selection import long_except
from truestep.policy.loading.load import load_policy
from truestep.policy.model import adding
from truestep.policy.model.adding import AddingLinear, add_in_products
from truestep.policy.model.joined import as_one
from truestep.policy.model.joining import JoinBackward, backend_over
from truestep.policy.weights.whole import WholeWeights
from truestep.rollouts.packing import pack_tokens

OURS = torch.ops.truestep


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


class Three(torch.nn.Module):
    """Three products of what came, of which one may be read for itself too."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.queries = torch.nn.Linear(6, 8, bias=False)
        self.keys = torch.nn.Linear(6, 4, bias=False)
        self.values = torch.nn.Linear(6, 3, bias=False)
        self.back = torch.nn.Linear(15, 6, bias=False)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        q, k, v = self.queries(x), self.keys(x), self.values(x)
        joined = self.back(torch.cat([q.sin(), k * v.sum(-1, keepdim=True), v.exp()], -1))
        return joined + x if self.read else joined


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The operators of all graphs that are compiled, after products are joined in them."""
    found: list[object] = []
    join = JoinBackward.__call__

    def told(self: JoinBackward, graph: torch.fx.Graph) -> None:
        join(self, graph)
        graph.lint()
        found.extend(node.target for node in graph.nodes)

    monkeypatch.setattr(JoinBackward, "__call__", told)
    return found


def compiled_one(layer: torch.nn.Module) -> Any:
    return torch.compile(layer.forward, backend=backend_over("inductor", JoinBackward), dynamic=True)


def results(layer: Three, run: Callable[[torch.Tensor], torch.Tensor], weights: WholeWeights) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 5 * 6).view(1, 5, 6).to(weights.dtype).requires_grad_()
    weights.zero_gradients()
    for _ in range(2):
        result = run(x)
        result.backward(torch.linspace(1, 2, 30).view(1, 5, 6).to(weights.dtype))
    assert x.grad is not None
    return [result.detach(), x.grad, *weights.gradients.values()]


@pytest.mark.parametrize("read", [False, True])
def test_joined_products_give_what_single_ones_do(
    read: bool, seen: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = Three(read)
    exact = Three(read).double()
    exact.load_state_dict(layer.state_dict())
    weights = WholeWeights(layer, torch.bfloat16)
    rounded = {name: parameter.double() for name, parameter in layer.named_parameters()}
    exact.load_state_dict(rounded)
    add_in_products([layer], weights, weights.rounded)
    assert as_one([layer.queries.weight, layer.keys.weight, layer.values.weight]) is not None
    plain = results(layer, layer, weights)
    whole: list[torch.Tensor | None] = []
    honest = adding.as_one
    monkeypatch.setattr(adding, "as_one", lambda given: whole.append(honest(given)) or whole[-1])
    found = results(layer, compiled_one(layer), weights)
    if read:  # what is read adds to the sum of gradients, in between
        assert seen.count(OURS.joined_backward.default) == 0
        assert seen.count(OURS.linear_backward.default) == 4
    else:
        assert len(whole) == 2, "two passes"
        assert all(one is not None for one in whole), "one product for three"
        assert seen.count(OURS.joined_backward.default) == 1
        assert seen.count(OURS.linear_backward.default) == 1, "of the one that is alone"

    exact_weights = WholeWeights(exact, torch.float64)
    expected = results(exact, exact, exact_weights)
    for mine, theirs, right in zip(found, plain, expected, strict=True):
        off, before = ((one.double() - right).norm() / right.norm() for one in (mine, theirs))
        assert off < 2e-2
        assert off < 1.3 * before + 1e-3, "no further from float64 than single products are"


def test_a_part_of_a_sum_that_is_read_apart_leaves_all_alone() -> None:
    """It would be computed once more for its reader, and add the gradient of its matrix again."""
    graph = torch.fx.Graph()
    gradients = [graph.placeholder(name) for name in "ab"]
    rows, *weights = (graph.placeholder(name) for name in ("x", "v", "w"))
    for node in gradients:
        node.meta["val"] = torch.empty(1, 2, 3)
    products = [
        graph.call_function(OURS.linear_backward.default, (gradient, rows, weight, number))
        for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True))
    ]
    total = graph.call_function(torch.ops.aten.add.Tensor, tuple(products))
    apart = graph.call_function(torch.ops.aten.neg.default, (products[1],))
    graph.output((total, apart))
    total.meta["val"] = torch.empty(1, 2, 4)
    JoinBackward()(graph)
    assert [node.target for node in graph.nodes].count(OURS.linear_backward.default) == 2
    apart.replace_all_uses_with(total)
    graph.erase_node(apart)
    JoinBackward()(graph)
    targets = [node.target for node in graph.nodes]
    assert targets.count(OURS.joined_backward.default) == 1
    assert targets.count(OURS.linear_backward.default) == 0


def test_products_of_different_rows_are_left_alone(seen: list[object]) -> None:
    class Apart(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.second = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(y)

    layer = Apart()
    weights = WholeWeights(layer, torch.bfloat16)
    add_in_products([layer], weights, weights.rounded)
    x, y = (torch.randn(1, 3, 4, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    compiled_one(layer)(x, y).sum().backward()
    assert seen.count(OURS.joined_backward.default) == 0
    assert seen.count(OURS.linear_backward.default) == 2
    torch.testing.assert_close(x.grad, torch.ones(1, 3, 4, dtype=torch.bfloat16) @ layer.first.weight)


@pytest.mark.parametrize("kind", long_except(["qwen3_tied", "gemma2"], "qwen3_tied"))
def test_a_models_layers_are_joined(kind: str, tiny_model: Callable[[str], Path], seen: list[object]) -> None:
    policy = load_policy(tiny_model(kind), dtype="bfloat16", device="cpu", compiled=True)
    policy.hidden(pack_tokens([torch.arange(9) % 7, torch.arange(4)])).float().square().sum().backward()
    assert seen.count(OURS.joined_backward.default) >= 2, "of queries, keys and values, and of an MLP's two"
    for layer in policy.model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention.q_proj, AddingLinear)
        assert as_one([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
        assert as_one([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None
