"""Products of the same rows with several weights: as one operator in compiled layers, as one product where weights lie
one behind another, and with the same training after that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from small_runs import file_config, merged, quiet_trainer, write_rollouts
from truestep.config.schema import Config
from truestep.generate.engine.engine import Engine, engine_of
from truestep.generate.engine.forward import compiled_layers, probe
from truestep.model.adapter import Adapter, LoraLinear
from truestep.model.fast import compiled
from truestep.model.fast import fused_products as joined
from truestep.model.loading.load import load_policy

Model = Callable[[str], Path]


def place_of(model: Any, names: list[str]) -> list[int]:
    weights = dict(model.named_parameters())
    return [weights[name].data_ptr() for name in names]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_the_operator_is_the_products_wherever_weights_lie(
    heights: list[int], rows: int, inner: int, together: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(heights), inner, generator=generator, dtype=torch.float64)
    weights = list(whole.split(heights)) if together else [part.clone() for part in whole.split(heights)]
    a = torch.randn(rows, inner, generator=generator, dtype=torch.float64)
    found = joined.joined_product(a, weights)
    expected = [[sum(a[r, k] * whole[n, k] for k in range(inner)) for n in range(len(whole))] for r in range(rows)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    with joined.noting() as noted:
        joined.joined_product(a, weights)
    assert bool(noted) == (joined.as_one(weights) is None)
    if together:
        assert not noted


def test_weights_that_are_not_one_behind_another_are_not_taken_for_it() -> None:
    whole = torch.randn(6, 4)
    first, second, third = whole.split(2)
    assert torch.equal(joined.as_one([first, second, third]), whole)  # type: ignore[arg-type]
    assert joined.as_one([second, first]) is None, "another order"
    assert joined.as_one([first, third]) is None, "a gap"
    assert joined.as_one([first, second.clone()]) is None
    assert joined.as_one([whole[:2, :2], whole[2:, :2]]) is None, "rows of a wider matrix"
    # What lies behind it by chance is other memory, which may go away.
    short = torch.empty(0).set_(whole.untyped_storage(), 0, (2, 4))
    behind = torch.frombuffer(memoryview(bytearray(64)), dtype=torch.float32).view(4, 4)
    assert joined.as_one([short, behind]) is None


@pytest.mark.long
@pytest.mark.parametrize(("kind", "of_a_layer"), [("qwen3", [3, 2]), ("qwen2", [2])])
def test_layers_multiply_once_by_what_meets_the_same_rows(
    kind: str, of_a_layer: list[int], tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen 2 adds something to queries, keys and values within their products: these stay alone."""
    torch._dynamo.reset()
    policy = load_policy(tiny_model(kind))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    with torch.no_grad(), compiled_layers(policy.model, {}):
        with joined.noting() as groups:
            probe(policy, found.layers, found.device.page_size)
        layers = policy.model.config.num_hidden_layers
        assert {len(group) for group in groups} == set(of_a_layer)
        assert len({tuple(weight.data_ptr() for weight in group) for group in groups}) == layers * len(of_a_layer)
        policy.weights.lay_together(groups)
        with joined.noting() as left:
            probe(policy, found.layers, found.device.page_size)
        assert not left, "all lie one behind another"
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.named_parameters())
    torch._dynamo.reset()


@pytest.mark.parametrize("on", [True, False])
def test_products_of_layers_with_adapters_are_the_layers(on: bool) -> None:
    """The adapters' first products are in the same operator, their second ones are added."""
    generator = torch.Generator().manual_seed(0)
    adapter = Adapter(2, 3.0, ())
    layers: list[Any] = [torch.nn.Linear(4, size, bias=False, dtype=torch.float64) for size in (3, 5, 2)]
    for place in (0, 2):
        down, up = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((2, 4), (layers[place].out_features, 2))
        )
        layers[place] = LoraLinear(layers[place], down, up, adapter)
    x = torch.randn(1, 6, 4, generator=generator, dtype=torch.float64)
    with torch.no_grad(), nullcontext() if on else adapter.off():
        rows, parts = joined.products_of(x, layers)
        for part, layer in zip(parts, layers, strict=True):
            torch.testing.assert_close(part, layer(x), rtol=1e-12, atol=1e-12)
    assert (rows is None) == on


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"freeze": ["*q_proj*"]}])
def test_training_goes_on_with_the_same_numbers(options: dict[str, Any], tiny_model: Model, tmp_path: Path) -> None:
    """Two runs of which one has its weights laid together before its first step."""
    write_rollouts(tmp_path / "rollouts.jsonl", 16)
    names = [f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in range(2) for kind in "qkv"]
    found = []
    for name in ("apart", "together"):
        config = file_config(
            tiny_model("qwen3"), tmp_path / "rollouts.jsonl", tmp_path / name,
            optimizer={"type": "adamw", "learning_rate": 1e-3}, schedule={"steps": 2}, checkpoint={"every": 1},
        )  # fmt: skip
        trainer = quiet_trainer(Config.model_validate(merged(config.model_dump(), {"model": options})))
        model = trainer.policy.model
        if name == "together":
            weights = dict(model.named_parameters())
            groups = [[weights[name] for name in names[:3]], [weights[name] for name in names[3:]]]
            trainer.policy.weights.lay_together([*groups, groups[0]])
        places = place_of(model, names)
        trainer.run()
        assert place_of(model, names) == places, "updates change them where they are"
        if name == "together":
            weights = dict(model.named_parameters())
            assert all(joined.as_one([weights[name] for name in part]) is not None for part in (names[:3], names[3:]))
            frozen = trainer.policy.weights.frozen
            assert all(tensor.data_ptr() == weights[name].data_ptr() for name, tensor in frozen.items())
        found.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
