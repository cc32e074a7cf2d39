"""Compiled layers: the same numbers as plain ones, compiled once for all of them and for micro-batches of any size.

torch's own backend takes minutes on a CPU; what decides what is compiled, and what runs it, is the same for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from documents import make_documents, pack_all
from oracles.step import oracle_step
from scoring import check_against_oracle, run_score, write_records
from selection import nightly_except
from step.test_score_oracle import config_for, records_for
from truestep.model.fast import compiled
from truestep.model.fast.gradient_accumulation import AddingLinear, add_in_products
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.weights.errors import ModelError
from truestep.weights.whole import WholeWeights

Made = Callable[[str], Path]
DOCUMENTS = make_documents([9, 1, 30, 4], seed=2)
ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def from_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not ON_GPU:
        monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def results(policy: Policy, documents: list[Any]) -> list[torch.Tensor]:
    policy.weights.zero_gradients()
    hidden = policy.hidden(pack_all(documents).tokens)
    (hidden.float() * torch.linspace(-1, 1, hidden.shape[1], device=hidden.device)).sum().backward()
    return [hidden.detach().float(), *(gradient.float().clone() for gradient in policy.weights.gradients.values())]


def off(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("kind", "recompute"),
    nightly_except(
        [("llama", True), ("gemma2", False), ("llama", "selective"), ("qwen3_tied", "elementwise")], ("llama", True)
    ),
)
def test_values_and_gradients_are_those_of_plain_layers(kind: str, recompute: bool | str, tiny_model: Made) -> None:
    plain = load_policy(tiny_model(kind), activation_checkpointing=recompute)
    policy = load_policy(tiny_model(kind), activation_checkpointing=recompute, compiled=True)
    assert graphs() == 0, "a probe runs plain layers"
    assert off(results(policy, DOCUMENTS), results(plain, DOCUMENTS)) < 1e-5
    made = graphs()
    assert made > 0
    for documents in (DOCUMENTS[:1], DOCUMENTS[1:3], [*DOCUMENTS, *DOCUMENTS, *DOCUMENTS]):
        assert off(results(policy, documents), results(plain, documents)) < 1e-5
    assert graphs() == made, "nothing is compiled anew for other documents"
    with torch.no_grad():
        policy.hidden(pack_all(DOCUMENTS).tokens)
    assert graphs() == made


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "recompute"), [("gemma2", True), ("qwen2", "elementwise")])
def test_products_add_the_gradients_of_half_precision_matrices(
    kind: str, recompute: bool | str, tiny_model: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd gives none of them; they are about those that it gives to plain layers, and what several passes add.
    Products of one input sum its gradient in float32. Qwen 2's queries, keys and values have biases, and stay."""
    plain = load_policy(tiny_model(kind), dtype="bfloat16", activation_checkpointing=recompute)
    policy = load_policy(tiny_model(kind), dtype="bfloat16", activation_checkpointing=recompute, compiled=True)
    names = {parameter: name for name, parameter in policy.model.named_parameters()}
    products = {f"{name}.weight" for name, module in policy.model.named_modules() if type(module) is AddingLinear}
    assert len(products) == (4 if kind == "qwen2" else 7) * policy.model.config.num_hidden_layers
    in_product, told = WholeWeights.add_product, list[str]()

    def add(weights: WholeWeights, parameter: torch.nn.Parameter, *product: torch.Tensor) -> None:
        told.append(names.get(parameter, "of the plain policy"))
        in_product(weights, parameter, *product)

    monkeypatch.setattr(WholeWeights, "add_product", add)
    for documents in (DOCUMENTS, DOCUMENTS[1:3]):
        for each in (plain, policy):
            each.weights.zero_gradients()
        for _ in range(2):
            for each in (plain, policy):
                hidden = each.hidden(pack_all(documents).tokens)
                (hidden.float() * torch.linspace(-1, 1, hidden.shape[1], device=hidden.device)).sum().backward()
        expected, found = plain.weights.gradients, policy.weights.gradients
        assert off(list(found.values()), list(expected.values())) < 2e-2
    assert set(told) == products and len(told) == 4 * len(products)
    assert all(parameter.grad is None for parameter in names)
    policy.weights.lay_together([[policy.model.base_model.layers[0].mlp.up_proj.weight]])
    results(policy, DOCUMENTS)
    assert "of the plain policy" not in told and len(told) == 5 * len(products), "it was found after it moved"


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix(x) + self.matrix(x)


class Sum:
    def __init__(self) -> None:
        self.total = torch.zeros(4, 4)

    def add_product(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        self.total += gradient.T @ rows

    def lay_together(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        assert not list(groups)


def test_equal_products_of_a_layer_add_a_gradient_each() -> None:
    """A compiler takes equal operations for one, and would add what they add once."""
    layer, keeper = Twice(), Sum()
    add_in_products([layer], keeper, [layer.matrix.weight])
    forward = torch.compile(layer.forward, backend=compiled.BACKEND, dynamic=True)
    expected = torch.zeros(4, 4)
    for tokens in (3, 5):
        x = torch.randn(tokens, 4, requires_grad=True)
        forward(x).sum().backward()
        expected += 2 * torch.ones(tokens, 4).T @ x.detach()
    torch.testing.assert_close(keeper.total, expected)


def test_a_matrix_that_was_replaced_is_named() -> None:
    layer, keeper = Twice(), Sum()
    add_in_products([layer], keeper, [layer.matrix.weight])
    result = layer(torch.randn(3, 4, requires_grad=True)).sum()
    layer.matrix.weight = torch.nn.Parameter(torch.randn(4, 4))
    with pytest.raises(RuntimeError, match="a weight that adds its own gradient was replaced or let go of"):
        result.backward()


def test_recomputation_is_around_what_is_compiled(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, recomputed = compiled.checkpoint, []

    def told(layer: Any, *arguments: Any, **options: Any) -> Any:
        recomputed.append(layer)
        return honest(layer, *arguments, **options)

    monkeypatch.setattr(compiled, "checkpoint", told)
    policy = load_policy(tiny_model("llama"), activation_checkpointing=True, compiled=True)
    results(policy, DOCUMENTS)
    assert len(recomputed) == policy.model.config.num_hidden_layers, "once a layer, and not by transformers as well"
    policy.model.eval()
    results(policy, DOCUMENTS)
    assert len(recomputed) == policy.model.config.num_hidden_layers
    assert not any(getattr(layer, "gradient_checkpointing", False) for layer in policy.model.model.layers)


@pytest.mark.nightly
def test_layers_share_what_is_compiled(tmp_path: Path) -> None:
    from tiny import make_model

    made = {}
    for layers in (2, 5):
        torch._dynamo.reset()
        counters.clear()
        policy = load_policy(make_model(tmp_path / str(layers), "llama", num_hidden_layers=layers), compiled=True)
        results(policy, DOCUMENTS)
        made[layers] = graphs()
    assert made[2] == made[5] > 0


def test_the_option_compiles_and_the_step_is_the_oracles(tiny_model: Made, tmp_path: Path) -> None:
    model = tiny_model("qwen3_tied")
    records = records_for(model, "grpo")
    config = config_for(model, write_records(tmp_path / "rollouts.jsonl", records), {"type": "grpo"})
    config["model"]["compile"] = True
    config["data"]["tokens_per_microbatch"] = 50
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_step(model, records, config))
    assert graphs() > 0


def test_a_model_without_a_list_of_layers_is_refused(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.model.loading.load.layers_of", lambda _: ("", []))
    with pytest.raises(ModelError, match=r"model\.compile: LlamaForCausalLM has no list of layers"):
        load_policy(tiny_model("llama"), compiled=True)
