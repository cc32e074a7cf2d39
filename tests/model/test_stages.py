"""A model cut into stages: where it is cut, that a stage is only its own layers, and what is where."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import KINDS, make_model
from truestep.model.cuts.stages import Stages, cut_by_cost, keep_own, stages_of
from truestep.model.loading.load import load_policy
from truestep.model.loading.probe import Probe, _tokens, make_documents, probe_stages
from truestep.model.mixers import attention
from truestep.model.policy import packed_hidden, stage_hidden
from truestep.ranks.pipeline import Pipeline
from truestep.weights.errors import ModelError
from truestep.weights.pieces import pieces_of

CPU = torch.device("cpu")


def brute_force(layers: list[float], head: float, stages: int) -> float:
    """The costliest stage of the best of all cuts."""
    best = float("inf")
    for borders in combinations(range(1, len(layers)), stages - 1):
        starts, stops = (0, *borders), (*borders, len(layers))
        costs = [sum(layers[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        best = min(best, max([*costs[:-1], costs[-1] + head]))
    return best


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 30), st.data())
def test_the_costliest_stage_is_as_cheap_as_can_be(layers: list[int], head: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    costs = [float(cost) for cost in layers]
    cut = cut_by_cost(costs, head, stages)
    assert [number for stage in cut for number in stage] == list(range(len(layers)))
    assert len(cut) == stages and all(len(stage) for stage in cut)
    found = [sum(costs[number] for number in stage) for stage in cut]
    found[-1] += head
    assert max(found) == pytest.approx(brute_force(costs, head, stages))


@pytest.mark.parametrize(
    ("layers", "head", "stages", "sizes"),
    [
        (8, 0.0, 4, [2, 2, 2, 2]),
        (32, 4.0, 4, [9, 9, 9, 5]),
        (28, 2.0, 2, [15, 13]),
        (4, 100.0, 4, [1, 1, 1, 1]),
        # However costly the head, the other stages are even.
        (10, 100.0, 4, [3, 3, 3, 1]),
    ],
)
def test_the_stage_of_the_head_has_fewer_layers(layers: int, head: float, stages: int, sizes: list[int]) -> None:
    assert [len(stage) for stage in cut_by_cost([1.0] * layers, head, stages)] == sizes


def whole_model(directory: Path, kind: str, layers: int = 4) -> Any:
    path = make_model(directory, kind, num_hidden_layers=layers)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention.NAME)


def documents(model: Any) -> Any:
    return _tokens(make_documents(model, 64))


def staged(model: Any, pipeline: Pipeline) -> Stages:
    batch = documents(model)
    return stages_of(model, pipeline, lambda: packed_hidden(model, batch, CPU))


@pytest.mark.parametrize("kind", KINDS)
def test_stages_one_after_another_are_the_model_and_so_are_their_gradients(kind: str, tmp_path: Path) -> None:
    model = whole_model(tmp_path / kind, kind)
    batch = documents(model)
    expected = packed_hidden(model, batch, CPU)
    expected.square().sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    stages = staged(model, Pipeline(2, 2))
    model.zero_grad()
    received: list[torch.Tensor | None] = [None]
    given = []
    for stage in range(4):
        given.append(stage_hidden(model, stages, stage, batch, CPU, received[-1]))
        received.append(given[-1].detach().requires_grad_())
    assert torch.equal(given[-1], expected)
    gradient = 2 * expected.detach()
    for stage in reversed(range(4)):
        given[stage].backward(gradient)
        if stage:
            leaf = received[stage]
            assert leaf is not None and leaf.grad is not None
            gradient = leaf.grad
    for name, value in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value)


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied"])
def test_each_rank_keeps_its_own_under_the_models_names(kind: str, tmp_path: Path) -> None:
    whole = dict(whole_model(tmp_path / kind, kind).named_parameters())
    tied = kind == "qwen3_tied"
    held: dict[str, list[int]] = {name: [] for name in whole}
    for rank in range(2):
        model = whole_model(tmp_path / kind, kind)
        stages = staged(model, Pipeline(2, 2))
        pieces = keep_own(model, stages, rank, pieces_of(model))
        assert list(pieces) == list(whole)
        for name, weight in model.named_parameters():
            assert torch.equal(weight, whole[name])
            held[name].append(rank)
        assert {name for name, piece in pieces.items() if rank in piece.stages} == set(dict(model.named_parameters()))
    assert held["model.embed_tokens.weight"] == ([0, 1] if tied else [0])
    assert held["model.norm.weight"] == [1]
    assert [held[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in range(4)] == [[0], [1], [0], [1]]
    assert tied or held["lm_head.weight"] == [1]


def test_a_closed_layer_is_never_run(tmp_path: Path) -> None:
    model = whole_model(tmp_path / "model", "llama")
    stages, batch = staged(model, Pipeline(2, 2)), documents(model)
    ran: list[int] = []
    for number, layer in enumerate(stages.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    hidden = stage_hidden(model, stages, 0, batch, CPU, None)
    assert ran == [0]
    stage_hidden(model, stages, 2, batch, CPU, hidden)
    assert ran == [0, 2]
    packed_hidden(model, batch, CPU)
    assert ran == [0, 2, 0, 1, 2, 3]


def test_a_model_that_does_something_between_its_layers_is_refused(tmp_path: Path) -> None:
    """Learned positions are added before the first layer, which no later stage could tell."""
    config = AutoConfig.for_model("gpt2", vocab_size=61, n_embd=32, n_layer=4, n_head=4, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match="wpe elsewhere than behind its layers"):
        stages_of(model, Pipeline(2), lambda: model(input_ids=torch.tensor([[1, 2, 3]])))


def test_a_weight_that_two_layers_share_is_refused(tmp_path: Path) -> None:
    model = whole_model(tmp_path / "model", "llama")
    model.model.layers[3].mlp = model.model.layers[0].mlp
    with pytest.raises(ModelError, match="shares a weight between layers"):
        keep_own(model, staged(model, Pipeline(2)), 0, pieces_of(model))


def test_a_model_whose_stages_give_other_values_is_refused(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(tiny_model("llama"), device="cpu")
    forward = type(policy.model.base_model).forward

    def marked(self: Any, **options: Any) -> Any:
        """What goes into the first layer comes out of the last, too."""
        kept: list[torch.Tensor] = []
        hook = self.layers[0].register_forward_pre_hook(lambda _, arguments: kept.append(arguments[0]))
        output = forward(self, **options)
        hook.remove()
        output.last_hidden_state = output.last_hidden_state + kept[0]
        return output

    monkeypatch.setattr(type(policy.model.base_model), "forward", marked)
    probe = Probe(make_documents(policy.model, 64), torch.zeros(0))
    with pytest.raises(ModelError, match="its layers in stages give other values"):
        probe_stages(policy.model, Pipeline(2), probe, CPU)
