"""A probe's model: all of its code, on the weights of one layer of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM

from selection import long_except
from tiny import make_model
from truestep.model.loading import probe
from truestep.model.loading.load import load_policy
from truestep.model.loading.probe_weights import borrowed_weights
from truestep.model.mixers import attention
from truestep.weights.errors import ModelError
from truestep.weights.lazy import Unread, unread_files

CPU = torch.device("cpu")
LAYERS = 24


def unread_model(path: Path) -> Any:
    with unread_files():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention.NAME)


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied"])
def test_layers_of_a_kind_share_weights_and_nothing_else_is_shared(kind: str, tmp_path: Path) -> None:
    model = unread_model(make_model(tmp_path, kind, num_hidden_layers=4))
    own = dict(model.named_parameters(remove_duplicate=False))
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    with borrowed_weights(model, CPU):
        inside = dict(model.named_parameters(remove_duplicate=False))
        assert (inside["lm_head.weight"] is inside["model.embed_tokens.weight"]) is tied
        for name, parameter in inside.items():
            first = ".".join("0" if part.isdigit() else part for part in name.split("."))
            assert parameter is inside[first]
            assert torch.equal(parameter, own[first].read())
        held = sum(parameter.numel() for parameter in model.parameters())
    assert held < 0.5 * sum(parameter.numel() for parameter in own.values())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter and isinstance(parameter, Unread) for name, parameter in own.items())
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_layers_of_other_shapes_have_their_own(tmp_path: Path) -> None:
    model = unread_model(make_model(tmp_path, "llama", num_hidden_layers=4))
    model.model.layers[2].mlp.up_proj.weight = torch.nn.Parameter(torch.ones(47, 32))
    with borrowed_weights(model, CPU):
        layers = model.model.layers
        assert layers[2].self_attn.q_proj.weight is not layers[0].self_attn.q_proj.weight
        assert layers[3].self_attn.q_proj.weight is layers[0].self_attn.q_proj.weight
        assert torch.equal(layers[2].mlp.up_proj.weight, torch.ones(47, 32))


@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
@pytest.mark.parametrize("kind", long_except(["llama", "gemma2"], "llama"))
def test_a_fault_of_one_layer_of_many_is_found_out(
    layer: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: one that has its own weights, or one that borrows them and adds a part only."""
    path = make_model(tmp_path, kind, num_hidden_layers=LAYERS)
    load_policy(path, device="cpu")
    honest = attention.packed_attention

    def one_document(module: Any, *values: Any, packed_layout: Any, **options: Any) -> Any:
        if module.layer_idx == layer:
            packed_layout = attention.make_layout(packed_layout.segments[[0, -1]], CPU)
        return honest(module, *values, packed_layout=packed_layout, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, one_document)
    with pytest.raises(ModelError, match="packed documents give other values"):
        load_policy(path, device="cpu")


def test_many_layers_on_the_weights_of_one_round_no_more_than_a_model_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These weights are so large that one layer forty times over would lose four times as much."""
    path = make_model(tmp_path, "llama", num_hidden_layers=40)
    tensors = load_file(path / "model.safetensors")
    large = {name: value * 3 if name.endswith("_proj.weight") else value for name, value in tensors.items()}
    save_file(large, path / "model.safetensors", {"format": "pt"})
    honest, found = probe._worst, []
    monkeypatch.setattr(probe, "_worst", lambda differences: found.append(honest(differences)) or found[-1])
    load_policy(path, device="cpu")
    assert 0 < max(found) < 8e-6
