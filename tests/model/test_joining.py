"""The gradient of rows that several products have: one product in training's backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from truestep.model.fast import gradient_accumulation as adding
from truestep.model.fast.fused_products import as_one
from truestep.model.fast.fused_products_compiler import JoinBackward, training_backend
from truestep.model.fast.gradient_accumulation import AddingLinear, add_in_products
from truestep.model.loading.load import load_policy
from truestep.rollouts.packing import pack_tokens
from truestep.weights.whole import WholeWeights

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


def operators(seen: list[object]) -> list[int]:
    """Count gradients of rows, of matrices, of both of one product, and of both of several or that wait."""
    ours = OURS.rows_backward, OURS.matrices_backward, OURS.linear_backward, OURS.joined_backward
    return [seen.count(operator.default) for operator in ours]


def compiled_one(layer: torch.nn.Module, remakes: bool) -> Any:
    return torch.compile(layer.forward, backend=training_backend("inductor", remakes), dynamic=True)


def results(layer: Three, run: Callable[[torch.Tensor], torch.Tensor], weights: WholeWeights) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 5 * 6).view(1, 5, 6).to(weights.dtype).requires_grad_()
    weights.zero_gradients()
    for _ in range(2):
        result = run(x)
        result.backward(torch.linspace(1, 2, 30).view(1, 5, 6).to(weights.dtype))
    assert x.grad is not None
    return [result.detach(), x.grad, *weights.gradients.values()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("remakes", "read", "expected"),
    [
        # None is joined where what is read adds to the sum of gradients, in between.
        (False, True, [0, 0, 4, 0]),
        (False, False, [0, 0, 1, 1]),
        # All but the last one are in two, and it waits for them.
        (True, True, [3, 3, 0, 1]),
        (True, False, [1, 1, 0, 1]),
    ],
)
def test_joined_products_give_what_single_ones_do(
    remakes: bool, read: bool, expected: list[int], seen: list[object], monkeypatch: pytest.MonkeyPatch
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
    found = results(layer, compiled_one(layer, remakes), weights)
    assert operators(seen) == expected
    if not read:
        assert len(whole) == (4 if remakes else 2), "in two passes"
        assert all(one is not None for one in whole), "one product for three"

    exact_weights = WholeWeights(exact, torch.float64)
    expected = results(exact, exact, exact_weights)
    for mine, theirs, right in zip(found, plain, expected, strict=True):
        off, before = ((one.double() - right).norm() / right.norm() for one in (mine, theirs))
        assert off < 2e-2
        assert off < 1.3 * before + 1e-3, "no further from float64 than single products are"


@pytest.mark.parametrize("read", [True, False])
def test_a_part_of_a_sum_that_is_read_apart_leaves_all_alone(read: bool) -> None:
    """It would be computed once more for its reader, and add the gradient of its matrix again."""
    graph = torch.fx.Graph()
    gradients = [graph.placeholder(name) for name in "ab"]
    rows, *weights = (graph.placeholder(name) for name in ("x", "v", "w"))
    for node in (*gradients, rows):
        node.meta["val"] = torch.empty(1, 2, 3)
    products = [
        graph.call_function(OURS.linear_backward.default, (gradient, rows, weight, number))
        for number, (gradient, weight) in enumerate(zip(gradients, weights, strict=True))
    ]
    for product in products:
        product.meta["val"] = torch.empty(1, 2, 4)
    total = graph.call_function(torch.ops.aten.add.Tensor, tuple(products))
    apart = graph.call_function(torch.ops.aten.neg.default, (products[1],))
    graph.output((total, apart))
    total.meta["val"] = torch.empty(1, 2, 4)
    if not read:
        apart.replace_all_uses_with(total)
        graph.erase_node(apart)
    JoinBackward(parts=True)(graph)
    graph.lint()
    assert operators([node.target for node in graph.nodes]) == ([1, 1, 0, 1] if read else [0, 0, 0, 1])
    last = graph.find_nodes(op="call_function", target=OURS.joined_backward.default)[0]
    assert len(last.args[2]) == (1 if read else 2), "the matrices of one, or of both"
    assert len(last.args[4]) == (1 if read else 0), "it waits for the other's matrix"


@pytest.mark.long
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
    compiled_one(layer, True)(x, y).sum().backward()
    assert operators(seen) == [1, 1, 0, 1]
    torch.testing.assert_close(x.grad, torch.ones(1, 3, 4, dtype=torch.bfloat16) @ layer.first.weight)


MODELS = ["qwen3_tied", pytest.param("gemma2", marks=pytest.mark.release)]


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.long
def test_a_models_layers_are_joined(kind: str, tiny_model: Callable[[str], Path], seen: list[object]) -> None:
    """Their gradients are no further from float32's than those of plain layers."""
    results = []
    for dtype, how in (("float32", None), ("bfloat16", None), ("bfloat16", False), ("bfloat16", "elementwise")):
        given: dict[str, Any] = {} if how is None else {"compiled": True, "activation_checkpointing": how}
        policy = load_policy(tiny_model(kind), dtype=dtype, device="cpu", **given)
        policy.weights.zero_gradients()
        policy.hidden(pack_tokens([torch.arange(90) % 7, torch.arange(40)])).float().square().sum().backward()
        results.append({name: gradient.clone() for name, gradient in policy.weights.gradients.items()})
    rows, matrices, _, last = operators(seen)
    assert rows == matrices >= 1 and last >= 4, "torch's attention lies between graphs, and each has a last product"
    exact, plain, *found = results
    for (name, right), kept in itertools.product(exact.items(), found):
        off, before = (float((one[name] - right).norm() / right.norm()) for one in (kept, plain))
        assert off < 1.5 * before + 1e-3, name
    for layer in policy.model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention.q_proj, AddingLinear)
        assert as_one([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
        assert as_one([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None
