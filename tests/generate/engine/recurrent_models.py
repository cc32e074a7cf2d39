"""Tiny random models whose layers keep states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import VOCABULARY
from truestep.model.policy import Policy
from truestep.rollouts.packing import pack_tokens

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 7, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
GATED = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
    "linear_conv_kernel_dim": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 3,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5_text": GATED,
    "qwen3_next": {
        **GATED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "head_dim": 8, "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "conv_kernel": 3, "chunk_size": 16,
    },
    "falcon_h1": {"num_hidden_layers": 2, "head_dim": 8, "mamba_d_ssm": 64, **MAMBA},
    "granitemoehybrid": {
        "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16, **MAMBA,
    },
    "kimi_linear": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 8,
        "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 3,
    },
}  # fmt: skip
FAMILIES: tuple[str, ...] = tuple(CONFIGS)


def made(directory: Path) -> Callable[[str], Path]:
    """Return a function that gives the directory of a family's model."""

    def make(family: str) -> Path:
        path = directory / family
        if not path.exists():
            config = AutoConfig.for_model(family, **{**COMMON, **CONFIGS[family]})
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.ndim > 1:  # what begins near 0 would let mistakes pass
                            parameter.copy_(0.2 * torch.randn(parameter.shape))
            model.save_pretrained(path)
        return path

    return make


def training_logprobs(policy: Policy, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Score a completion as training does, in one pass, together with another document."""
    ids = torch.tensor([*prompt, *tokens]).numpy()
    with torch.no_grad():
        hidden = policy.hidden_alone(pack_tokens([ids[:3], ids]))[3 : 3 + len(ids)]
        logits = policy.raw_logits(hidden).float().log_softmax(-1)
    rows = range(len(prompt) - 1, len(ids) - 1)
    return [float(logits[row, ids[row + 1]]) for row in rows]
