"""The one rule that finds a model's decoder layers."""

from typing import Any

import torch


def layers_of(model: Any) -> tuple[str, list[torch.nn.Module]]:
    """Find the name and the members of the model's list of layers: as many as its configuration says; else none.

    Of several such lists the outermost is taken, which comes first: a layer may have as many experts.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, list(module)
    return "", []
