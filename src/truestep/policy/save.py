"""A policy to a Hugging Face directory: what came in goes out, with the trained weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from truestep.policy.policy import Policy

# Written anew with the weights, or of the weights that came in.
_REPLACED = ("config.json", "generation_config.json")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def save_policy(policy: Policy, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Into a new directory. The float32 weights by default; another type is rounded to once."""
    tensors = {
        name: policy.weights.master.get(name, parameter).detach().to(dtype)
        for name, parameter in policy.model.named_parameters()
    }
    # transformers knows the names and groupings that this architecture's files use; tied tensors are written once.
    policy.model.save_pretrained(directory, state_dict=tensors)
    for file in policy.path.iterdir():
        if file.is_file() and file.name not in _REPLACED and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, directory / file.name)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
