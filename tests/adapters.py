"""Adapters for tests: written by hand in peft's format, merged in float64, and the chain rule of their gradients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SMALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path, model: Path, rank: int = 3, alpha: float = 5.0, layers: Sequence[str] = SMALL, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Write a random adapter, neither of whose matrices is zero, and give its tensors by the names in the file."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in layers and weight.ndim == 2:
            rows, columns = weight.shape
            path = f"base_model.model.{layer}"
            tensors[f"{path}.lora_A.weight"] = 0.1 * torch.randn(rank, columns, generator=generator)
            tensors[f"{path}.lora_B.weight"] = 0.1 * torch.randn(rows, rank, generator=generator)
    assert tensors
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha}
    settings |= {"base_model_name_or_path": str(model), "target_modules": list(layers), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tensors


def read_adapter(directory: Path) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], float]:
    """Read an adapter's matrices A and B by the names of the weights they are added to, and their scale."""
    settings = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "adapter_model.safetensors")
    pairs = {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            pairs[weight] = (down.double(), up.double())
    return pairs, settings["lora_alpha"] / settings["r"]


def write_merged(model: Path, adapter: Path, directory: Path) -> Path:
    """Write the model with W + scale · B A in the place of W, in float64."""
    shutil.copytree(model, directory)
    tensors = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    pairs, scale = read_adapter(adapter)
    for name, (down, up) in pairs.items():
        tensors[name] = tensors[name] + scale * up @ down
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def chain_rule(gradients: Mapping[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """Give the gradients of A and B from those of the merged weights."""
    pairs, scale = read_adapter(adapter)
    found = {}
    for name, (down, up) in pairs.items():
        layer = name.removesuffix(".weight")
        found[f"{layer}.lora_A.weight"] = scale * up.T @ gradients[name].double()
        found[f"{layer}.lora_B.weight"] = scale * gradients[name].double() @ down.T
    return found
