"""Random models of Qwen3's, Qwen3.5's and Gemma 2's shape, as benchmarks train them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# The text part of Qwen3.5-4B, which has 32 layers.
QWEN35 = {
    "vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def write_qwen35(directory: Path, shape: Mapping[str, int], layers: int, *, device: str, longest: int = 65_536) -> None:
    """Every fourth layer attends, and the others have a gated delta rule and a convolution."""
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    how = {"num_hidden_layers": layers, "layer_types": kinds, "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3_5_text", **shape, **how, max_position_embeddings=longest)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)


def delta_rule_flops(heads: int, size: int, chunk: int = 64) -> float:
    """Count the products of a token in the chunked algorithm: four within its chunk, and four with the state."""
    return heads * (2.0 * chunk * size * 4 + 2.0 * size * size * 4)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the options that `write_model` reads. Their defaults are a model of 1.72B parameters."""
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=6144)
    parser.add_argument("--vocabulary", type=int, default=151_936)


def write_model(
    directory: Path, given: argparse.Namespace, *, device: str, head_size: int = 128, longest: int = 32_768
) -> None:
    """`given` has its layers, hidden and intermediate size and vocabulary; `longest` is its longest document."""
    config = Qwen3Config(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=getattr(given, "heads", 16),
        num_key_value_heads=8,
        head_dim=head_size,
        max_position_embeddings=longest,
        tie_word_embeddings=not getattr(given, "untied", False),
        initializer_range=getattr(given, "scale", 0.02),
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def write_gemma2(directory: Path, given: argparse.Namespace, *, device: str) -> None:
    """Heads of 256, a softcap on scores and on logits, and a window of 4,096 tokens in every second layer."""
    config = Gemma2Config(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        max_position_embeddings=32_768,
    )
    with torch.device(device):
        model = Gemma2ForCausalLM(config)
    model.save_pretrained(directory)
