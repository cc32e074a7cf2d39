"""Models and configurations of plans: shapes without values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

from small_runs import merged
from truestep.config.schema import Config
from truestep.model.adapter import AdapterSettings, AdapterSource
from truestep.model.loading.adapter_source import attach_adapter
from truestep.plan.rates import Rates
from truestep.plan.shape import ModelShape, shape_of


def qwen3(
    hidden: int,
    intermediate: int,
    layers: int = 28,
    heads: int = 16,
    tied: bool = True,
    rank: int = 0,
    vocabulary: int = 151_936,
) -> ModelShape:
    """Give a model's shape; with a rank, that of the model with an adapter on all its linear layers."""
    config = transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        return shape_of(model, attach_adapter(model, AdapterSource(AdapterSettings(rank, rank))) if rank else None)


# Two cards and one of a slow bus, as benchmarks/RESULTS.md and data sheets have them.
H200 = Rates("H200", 139.0, 700e12, 50e12, 343e12, 616e12, 4.2e12, 48e9, 1e-5, 350e9)
H100 = dataclasses.replace(H200, card="H100", memory=79.0, copy=2.9e12)
SLOW = Rates("4090", 23.5, 130e12, 10e12, 91e12, 0.0, 0.88e12, 22e9, 1e-5, 10e9)

SMALL, MIDDLE = qwen3(1024, 3072), qwen3(2048, 6144)
BIG = qwen3(4096, 12288, layers=36, heads=32, tied=False)  # of Qwen3-8B
WIDER = qwen3(2560, 9728, layers=36)
THIRD = qwen3(4096, 12288, layers=12, heads=32, tied=False, vocabulary=50_688)  # a third of its layers and words
ADAPTED_BIG = qwen3(4096, 12288, layers=36, heads=32, tied=False, rank=32)
ADAPTED_BIGGER = qwen3(5120, 25600, layers=64, heads=64, tied=False, rank=32)  # of Qwen3-32B


def config_of(tokens: int, *, several: bool = True, chunk: int | str = "auto", **options: Any) -> Config:
    names = ("compile", "activation_checkpointing", "attention")
    model = {name: options.pop(name) for name in names if name in options}
    optimizer = options.pop("optimizer", {})
    one = {"docs_per_step": 0, "depth_first_micro_batches": 1}
    base = {
        "model": {"path": "none", "dtype": "bfloat16", "head": {"fp32_lm_head": True, "logits_chunk_size": chunk}},
        "data": {"path": "none", "advantages": "none", "tokens_per_microbatch": tokens},
        "schedule": {"docs_per_step": 64} if several else one,
        "checkpoint": {"directory": "none"},
    }
    return Config.model_validate(merged(base, {"model": model, "optimizer": optimizer, "parallel": options}))
