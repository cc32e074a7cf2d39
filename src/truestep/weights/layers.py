"""Finds a model's decoder layers, and counts the weights that a token is multiplied with."""

from typing import Any

import torch

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the expert count in configurations


def is_of_experts(name: str) -> bool:
    """Tell whether a weight's name is that of routed experts."""
    return "experts." in name and "shared" not in name


def layers_of(model: Any) -> tuple[str, list[torch.nn.Module]]:
    """Return the name and the members of the model's list of layers: the first module list whose length is the number
    of layers in the configuration. This finds the outermost list, even if a layer has as many experts. Without such a
    list: ("", []).
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, list(module)
    return "", []


def active_weights(model: Any, part: torch.nn.Module, trained: bool | None = None) -> float:
    """Count a module's weights that one token uses. Of routed experts, only the chosen ones count. `trained`: count
    only trained (True) or only frozen (False) weights."""
    config = model.config.get_text_config()
    experts = next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    return sum(
        parameter.numel() * (share if is_of_experts(name) else 1.0)
        for name, parameter in part.named_parameters()
        if trained is None or parameter.requires_grad is trained
    )
