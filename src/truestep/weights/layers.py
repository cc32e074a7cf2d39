"""The one rule that finds a model's decoder layers, and the one that counts the weights a token meets."""

from typing import Any

import torch

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # their names in configurations


def layers_of(model: Any) -> tuple[str, list[torch.nn.Module]]:
    """Find the name and the members of the model's list of layers: as many as its configuration says; else none.

    Of several such lists the outermost is taken, which comes first: a layer may have as many experts.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, list(module)
    return "", []


def active_weights(model: Any, part: torch.nn.Module, trained: bool | None = None) -> float:
    """Count the weights of a part that a token meets; of experts, as many as are chosen for it. `trained`: those alone
    that are, or that are not."""
    config = model.config.get_text_config()
    experts = next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    return sum(
        parameter.numel() * (share if "experts." in name and "shared" not in name else 1.0)
        for name, parameter in part.named_parameters()
        if trained is None or parameter.requires_grad is trained
    )
