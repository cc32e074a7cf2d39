"""Families with recurrent layers: packed documents against transformers' own code in float64 on each document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.model.mixers.registered import put_in
from truestep.model.no_dropout import no_noise
from truestep.model.policy import packed_hidden
from truestep.rollouts.packing import pack_tokens
from truestep.tools.verify.reference import Float64, Reference
from truestep.weights.errors import ModelError

LENGTHS = (5, 1, 130, 33, 16, 65)
_COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # The norms of what a layer reads from a state would enlarge the rounding of a document's first tokens.
    "rms_norm_eps": 1e-2,
    "layer_norm_epsilon": 1e-2,
}
_KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen3_next": _DELTA | _EXPERTS | {"layer_types": _KINDS, "decoder_sparse_step": 1},
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4, "layer_types": _KINDS},
    "kimi_linear": _EXPERTS
    | {
        "layer_types": _KINDS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "nemotron_h": _EXPERTS
    | {
        "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "head_dim": 16,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "head_dim": 16},
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1, 3],
        "adapter_rank": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_expand": 2,
        "num_key_value_heads": 4,
    },
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
}
SHORT = ("qwen3_5_text", "nemotron_h", "kimi_linear", "jamba")


def make_hybrid(directory: Path, kind: str) -> Path:
    config = AutoConfig.for_model(kind, **(_COMMON | FAMILIES[kind]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias")):
                weight.copy_(0.3 * noise - (0.5 if name.endswith("dt_bias") else 0.0))
            elif "norm" in name:
                weight.add_(0.1 * noise)
            else:
                weight.copy_((0.5 if "conv" in name else 0.15) * noise)
    model.save_pretrained(directory)
    return directory


def results(model: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """The hidden states, and the gradients of a weighted sum of them."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad((hidden * weights).sum(), list(named.values()), allow_unused=True)
    found = {name: value for name, value in zip(named, gradients, strict=True) if value is not None}
    return {"hidden": hidden.detach(), **found}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SHORT else pytest.mark.long) for kind in FAMILIES]
)
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_packed_documents_are_documents_alone(kind: str, recomputes: bool, tmp_path: Path) -> None:
    directory = make_hybrid(tmp_path / kind, kind)
    policy = load_policy(directory, device="cpu", activation_checkpointing=recomputes)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    packed = policy.hidden(pack_tokens([document.numpy() for document in documents], 8))  # padded at the end
    ours = results(policy.model, packed[: sum(LENGTHS)])
    exact = Reference(directory)._model
    with Float64():
        right = alone(exact, documents)
    own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    no_noise(own)
    theirs = alone(own, documents)
    assert ours.keys() == theirs.keys() == right.keys()
    # Some of these random models enlarge float32's rounding in any order of computation; float64 says the rest.
    rounding = max(off(theirs[name], wanted) for name, wanted in right.items())
    worst = {name: off(ours[name], wanted) for name, wanted in right.items()}
    assert max(worst.values()) < min(max(1e-5, 2 * rounding), 1e-4), max(worst.items(), key=lambda item: item[1])


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-6))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SHORT else pytest.mark.long) for kind in FAMILIES]
)
def test_in_float64_packed_documents_are_documents_alone_to_its_rounding(kind: str, tmp_path: Path) -> None:
    directory = make_hybrid(tmp_path / kind, kind)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(61, (length,), generator=generator) for length in LENGTHS]
    exact, packed = Reference(directory)._model, Reference(directory)._model
    put_in(packed)
    packed.set_attn_implementation(attention.NAME)
    tokens = pack_tokens([document.numpy() for document in documents], 8)
    with Float64():
        right = alone(exact, documents)
        ours = results(packed, packed_hidden(packed, tokens, torch.device("cpu"))[: sum(LENGTHS)])
    assert ours.keys() == right.keys() and right["hidden"].dtype == torch.float64
    for name, wanted in right.items():
        most = 1e-9 if wanted.dtype == torch.float64 else 1e-6  # a few weights are float32 in transformers' code
        assert float((ours[name] - wanted).norm() / wanted.norm().clamp(min=1e-9)) < most, name


def alone(model: Any, documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    hidden = [model.base_model(input_ids=document[None], use_cache=False)[0][0] for document in documents]
    return results(model, torch.cat(hidden))


def test_a_state_that_nobody_registered_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("minimax", **(_COMMON | {"layer_types": _KINDS, "num_local_experts": 2}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MiniMaxLightningAttention.* keeps a state .* no operation is registered"):
        load_policy(tmp_path, device="cpu")
