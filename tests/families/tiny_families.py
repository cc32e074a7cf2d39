"""A tiny random model of any family that transformers has.

Sizes are set by the names that configurations give them. Families whose configurations need more are listed by name.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 61  # a prime: no block, shard or chunk size divides it
LAYERS = 4  # the fewest that have every kind of layer of most families with several kinds

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "n_positions": 256,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 5,
    "attention_chunk_size": 16,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 48,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "intermediate_size_mlp": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_rank": 4,
    "lru_width": 32,
    "dim_model_base": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 256,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "is_decoder": True,
    # Towers.
    "depth": 2,
    "out_hidden_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "output_proj_dims": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "pad_token_id": 7,  # a token that documents hold: transformers gives its row no gradient unless it is told to
    "bos_token_id": 0,
    "eos_token_id": 1,
}

LEFT = object()  # a size that stays as the family has it
# What a family needs beside, or in place of, the sizes above.
_LINEAR_LAYERS = ["linear_attention", "linear_attention", "hybrid", "linear_attention"]
OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    # Two layers that reuse the keys and values of those before them.
    "gemma4_text": {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
                    "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "helium": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": _LINEAR_LAYERS, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# Families whose configurations have sizes that cannot be set.
LARGE = ("blt",)


def families() -> list[str]:
    """List every model type that transformers has a causal language model for."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """Make a tiny configuration of a family."""
    return _tiny(CONFIG_MAPPING[family], family)


def _tiny(kind: Any, family: str) -> Any:
    plain = kind()
    known = {*inspect.signature(kind).parameters, *plain.to_dict(), *kind.attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention: each head has a key of its own, of which a part is rotated
        sizes |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
        sizes = {name: value for name, value in sizes.items() if name in known}
    sizes |= OWN.get(family, {})
    for name in kind.sub_configs:
        part, sub = getattr(plain, name, None), kind.sub_configs[name]
        if part is None and name == "vision_config" and sub.model_type:
            part = sub()
        if part is not None and name not in sizes:
            sizes[name] = _tiny(type(part), part.model_type)
    return kind(**{name: value for name, value in sizes.items() if value is not LEFT})


def tiny_family(directory: Path, family: str, seed: int = 0) -> Path:
    """Write a tiny model of a family, each weight a little off from where the family's own code sets it."""
    return _write(AutoModelForCausalLM, directory, tiny_config(family), seed)


def tiny_whole(directory: Path, family: str, seed: int = 0) -> Path:
    """Write a tiny model of a family whose text model has a tower beside it."""
    config = tiny_config(family)
    for name in ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "boi_token_id"):
        if hasattr(config, name):
            setattr(config, name, VOCABULARY - 1)
    return _write(AutoModelForImageTextToText, directory, config, seed)


def _write(loader: Any, directory: Path, config: Any, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = loader.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.add_(0.1 * torch.randn(weight.shape))
                if "q_norm" in name and config.model_type.startswith("gemma4"):
                    weight.mul_(
                        0.25
                    )  # it does not scale scores: they would be so large that rounding is all that counts
    model.save_pretrained(directory)
    return directory
