"""The one architecture that the test servers serve. Weights differ from test to test: they are sent after the start."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from truestep.environments import sorting
from truestep.tools.demo.model import make_tokenizer

LONGEST = 1024
LIKELIEST = 3  # of the served model's own sampling defaults, which nobody should meet


def make_model(directory: Path, seed: int, *, spread: float = 1.0, talkative: bool = False) -> Path:
    """`spread` 0: weights as a training begins with. Above: logits far from flat, so that a wrong one shows.
    `talkative`: it hardly ever ends a text."""
    size = make_tokenizer(directory, sorting.WORDS)
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention for CPUs knows no smaller one
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    if spread:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * spread * parameter.shape[-1] ** -0.5)
    if talkative:
        with torch.no_grad():
            model.lm_head.weight.mul_(3)
            model.lm_head.weight[0] = 0
    model.save_pretrained(directory)
    return directory


def give_sampling_defaults(directory: Path) -> Path:
    """As Qwen3 and others come: a server takes these for whatever a request leaves out."""
    file = directory / "generation_config.json"
    defaults = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(
        json.dumps(defaults | {"do_sample": True, "top_k": LIKELIEST, "temperature": 0.2}), encoding="utf-8"
    )
    return directory
