"""The one architecture that the test servers serve. Weights differ from test to test: they are sent after the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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


def make_mixture(directory: Path, seed: int, *, spread: bool = True, **changes: Any) -> Path:
    """Layers 1 and 2 of three route. Without `spread`, weights are as a training begins with."""
    options: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": LONGEST,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    size = make_tokenizer(directory, sorting.WORDS)
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=size, **options | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if spread and parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
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


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
# Families with recurrent layers that a vLLM on a CPU computes in float32. For gated delta rules it wants bfloat16.
HYBRIDS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 96},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128, "head_dim": 32},
}


def make_hybrid(directory: Path, family: str, seed: int) -> Path:
    size = make_tokenizer(directory, sorting.WORDS)
    config = AutoConfig.for_model(
        family,
        vocab_size=size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
        **HYBRIDS[family],
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # a convolution sums few numbers
                size_of_sum = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
                parameter.copy_(torch.randn(parameter.shape) * size_of_sum)
    model.save_pretrained(directory)
    return directory
