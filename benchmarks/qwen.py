"""A random model of Qwen3's shape, as benchmarks train it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def write_model(
    directory: Path, given: argparse.Namespace, *, device: str, head_size: int = 128, longest: int = 32_768
) -> None:
    """`given` has its layers, hidden and intermediate size and vocabulary; `longest` is its longest document."""
    config = Qwen3Config(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=head_size,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
