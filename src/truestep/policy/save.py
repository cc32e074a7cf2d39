"""Saving a policy as a Hugging Face directory: the files that came in, with the trained weights."""

import json
from pathlib import Path
from typing import Any

import torch

from truestep.policy.policy import Policy
from truestep.policy.tensor_files import transformers_write_tensors

# What belongs to a model besides its weights: tokenizer, templates, code, licences.
_COMPANIONS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md")
# Written anew with the weights, or of the weights that came in.
_REPLACED = ("config.json", "generation_config.json")


def read_companions(directory: Path) -> dict[str, bytes]:
    """Read the directory's other files with the model: when it is saved, the directory may be gone."""
    return {
        file.name: file.read_bytes()
        for file in directory.iterdir()
        if file.is_file()
        and (file.suffix in _COMPANIONS or file.name.startswith(("LICENSE", "NOTICE")))
        and file.name not in _REPLACED
        and not file.name.endswith(".index.json")
    }


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Give the buffers that belong to the weights, such as a router's correction, by the names that a load asks for."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict().items() if name not in named}


def save_policy(policy: Policy, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a new directory on the first rank; every rank calls this. The float32 weights are rounded once."""
    tensors = policy.weights.collect(dtype)
    if not policy.weights.ranks.first:
        return
    tensors |= {**policy.buffers, **saved_buffers(policy.model)}
    # transformers knows the names and groupings that this architecture's files use; tied tensors are written once.
    with transformers_write_tensors():
        policy.model.save_pretrained(directory, state_dict=tensors)
    for name, content in policy.companions.items():
        (directory / name).write_bytes(content)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
