"""Which modules are a model's decoder layers, where other lists of modules are longer or as long."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.distributed.fsdp import FSDPModule

from ranks.cases import on_ranks
from truestep.model.policy import ATTENTION_SLOWNESS, ModelFacts
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join, leave
from truestep.weights.layers import active_weights, layers_of
from truestep.weights.sharded import ShardedWeights


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
    on_ranks(2, _check_sharded)


def _check_sharded() -> None:
    model = Model(2, 64)
    ranks = join(RankLayout(), device="cpu", stall_timeout=30)
    weights = ShardedWeights(model, torch.float32, ranks, device=torch.device("cpu"))
    apart = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    layers = {f"base_model.layers.{number}" for number in range(2)}
    assert apart == {"base_model", "base_model.embedding", "lm_head", *layers}
    assert len(weights.master) == len(weights.pieces) == 2 + 2 * 2 * 64
    leave()


def test_a_document_costs_by_the_experts_that_a_token_meets() -> None:
    """Qwen3-30B-A3B's shape, of which a token meets 3.3 billion weights: attention is not cheap beside those."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    attention = 2048 * 128 * (32 + 4 + 4) + 32 * 128 * 2048
    experts = 8 * 3 * 2048 * 768 + 128 * 2048  # those chosen, and the router
    norms = 2 * 2048 + 2 * 128
    layers, ends = 48 * (attention + experts + norms), 151936 * 2048
    assert active_weights(model, model) == layers + 2 * ends + 2048
    assert 3.2e9 < layers + 2 * ends < 3.4e9
    facts = ModelFacts.of(model, torch.device("cpu"))
    assert facts.even_length == (layers + ends + 2048) / (48 * 32 * 128)  # the input embedding multiplies nothing
    beside = ModelFacts.of(model, torch.device("cuda"))
    assert beside.even_length == facts.even_length / ATTENTION_SLOWNESS
    assert math.isclose(beside.measured(2.0).even_length, facts.even_length / 2)
