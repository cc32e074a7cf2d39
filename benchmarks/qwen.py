"""Random models of Qwen3's and of Gemma 2's shape, as benchmarks train them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM


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
