"""Which modules are a model's decoder layers, where other lists of modules are longer or as long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from truestep.policy.cuts.layers import layers_of
from truestep.policy.weights.sharded import ShardedWeights
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join, leave
from truestep.ranks.launch import run_ranks


class Layer(torch.nn.Module):
    def __init__(self, experts: int):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(experts))


class Body(torch.nn.Module):
    def __init__(self, layers: int, experts: int):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 2)
        self.layers = torch.nn.ModuleList(Layer(experts) for _ in range(layers))


class Model(torch.nn.Module):
    """What is asked of a transformers model before it runs."""

    def __init__(self, layers: int, experts: int):
        super().__init__()
        self.base_model = Body(layers, experts)
        self.lm_head = torch.nn.Linear(2, 5, bias=False)
        text: Any = SimpleNamespace(num_hidden_layers=layers)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.base_model.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def test_layers_among_more_experts_and_among_as_many() -> None:
    for experts in (64, 3):
        model = Model(3, experts)
        assert layers_of(model) == ("base_model.layers", list(model.base_model.layers))
    model.config.get_text_config().num_hidden_layers = 4
    assert layers_of(model) == ("", [])


def test_layers_are_sharded_and_their_experts_are_not() -> None:
    run_ranks(2, _check_sharded)


def _check_sharded() -> None:
    model = Model(2, 64)
    ranks = join(RankLayout(), device="cpu", stall_timeout=30)
    weights = ShardedWeights(model, torch.float32, ranks, device=torch.device("cpu"))
    apart = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    layers = {f"base_model.layers.{number}" for number in range(2)}
    assert apart == {"base_model", "base_model.embedding", "lm_head", *layers}
    assert len(weights.master) == len(weights.pieces) == 2 + 2 * 2 * 64
    leave()
