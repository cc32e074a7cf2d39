"""Products of the same rows with several weights: as one operator in compiled layers, as one product where weights lie
one behind another, and with the same training after that."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code

from selection import in_tiers
from small_runs import file_config, merged, quiet_trainer, write_rollouts
from truestep.config.schema import Config
from truestep.generate.engine.engine import Engine, engine_of
from truestep.generate.engine.forward import compiled_layers, probe
from truestep.model.fast import compiled
from truestep.model.fast import fused_products as joined
from truestep.model.fast.fused_products_compiler import Join, sampling_backend, training_backend
from truestep.model.loading.load import load_policy

Model = Callable[[str], Path]


class Joining:
    """Torch's own way to the graph that the compiler would be given, and that graph run as it is: counts products."""

    def __init__(self) -> None:
        self.joined = list[int]()
        self.added = 0
        self.backend = aot_autograd(fw_compiler=self._run, decompositions=select_decomp_table())

    def _run(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        Join()(module.graph)
        module.graph.lint()
        module.recompile()
        operator = torch.ops.truestep.joined_product.default
        self.joined += [len(node.args[1]) for node in module.graph.nodes if node.target is operator]
        self.added += sum(str(node.args[:1]).count("add_product_") for node in module.graph.nodes)
        return module


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


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_a_product_is_added_in_place(height: int, rows: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, weight = (torch.randn(n, inner, generator=generator, dtype=torch.float64) for n in (rows, height))
    onto = torch.randn(1, rows, height, generator=generator, dtype=torch.float64)
    expected = [
        [float(onto[0, r, n]) + sum(float(a[r, k] * weight[n, k]) for k in range(inner)) for n in range(height)]
        for r in range(rows)
    ]
    joined.add_product_(onto, a, weight)
    torch.testing.assert_close(onto[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


WHAT = ["", "rows read", "product read", "rows given", "half of it", "one row", "float64"]
COMPILED = [(what, "inductor") for what in WHAT]


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "backend"), [(what, "graph") for what in WHAT] + in_tiers(COMPILED, COMPILED[:1], COMPILED[1:3])
)
def test_rows_that_a_product_adds_to_stay_what_they_are(what: str, backend: str) -> None:
    """Something else may read them later. Given rows are nobody's to change, and products that something else reads, or
    sums of another kind, are made as they are written."""
    torch._dynamo.reset()
    counts = Joining()

    def work(x: torch.Tensor, y: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x if what == "rows given" else x + y
        product = torch.nn.functional.silu(rows * rows.mean(-1, keepdim=True)) @ wide.T @ narrow.T
        onto = {"one row": rows[:, :1] + 1, "float64": x.double() + 1}.get(what, rows)
        rest = {"rows read": (rows * 2, rows), "product read": (product,)}.get(what, ())
        return torch.add(onto, product, alpha=0.5 if what == "half of it" else 1), *rest

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator) for shape in ((1, 5, 8), (1, 5, 8), (16, 8), (8, 16))]
    before = [tensor.clone() for tensor in given]
    with torch.no_grad():
        expected = work(*given)
        using = counts.backend if backend == "graph" else sampling_backend("inductor")
        found, code = run_and_get_code(torch.compile(work, dynamic=True, backend=using), *given)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, was) for tensor, was in zip(given, before, strict=True))
    if backend == "graph":
        assert counts.added == (what in ("", "rows read"))
    elif not what:
        # The kernel of what is multiplied makes the rows, too, and nothing is copied behind the product.
        calls = re.findall(r"^ +(cpp_fused\w*|.*add_product_\.default)\((.*)\)$", code[-1], re.MULTILINE)
        assert [name.rpartition(".")[2] == "default" for name, _ in calls] == [False, True]
        assert calls[1][1].partition(",")[0] in calls[0][1]
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "of_a_layer"), [("qwen3", [3, 2]), ("llama", [3, 2]), ("gemma2", [3, 2]), ("qwen2", [2])]
)
@pytest.mark.long
def test_layers_multiply_once_by_what_meets_the_same_rows(
    kind: str, of_a_layer: list[int], tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen 2 adds something to queries, keys and values within their products: these stay alone. Gemma 2 norms what an
    MLP gives before it is added."""
    torch._dynamo.reset()
    policy = load_policy(tiny_model(kind))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    counts = Joining()
    monkeypatch.setattr(compiled, "BACKEND", counts.backend)
    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    with torch.no_grad(), compiled_layers(policy.model, {}):
        with joined.noting() as groups:
            probe(policy, found.layers, found.device.page_size)
        assert set(counts.joined) == set(of_a_layer)
        assert bool(counts.added) == (kind != "gemma2")
        layers = policy.model.config.num_hidden_layers
        assert {len(group) for group in groups} == set(of_a_layer)
        assert len({tuple(weight.data_ptr() for weight in group) for group in groups}) == layers * len(of_a_layer)
        policy.weights.lay_together(groups)
        with joined.noting() as left:
            probe(policy, found.layers, found.device.page_size)
        assert not left, "all lie one behind another"
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.named_parameters())
    torch._dynamo.reset()


def test_another_compiler_stays_as_it_is() -> None:
    assert sampling_backend("eager") == training_backend("eager", True) == "eager"
    assert sampling_backend("inductor") is sampling_backend("inductor") != "inductor"
    assert training_backend("inductor", True) is training_backend("inductor", True)
    assert training_backend("inductor", True) is not training_backend("inductor", False)
    assert Join().uuid() == Join().uuid() is not None


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
