"""The one rule that finds a model's decoder layers."""

from __future__ import annotations

from typing import Any

import torch


def layers_of(model: Any) -> tuple[str, list[torch.nn.Module]]:
    """Find the list of as many modules as the configuration counts layers: its name and its members.

    Nothing of a model that has no such list. Of several the outermost is taken, which comes first: experts and other
    parts of a layer may be as many.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, list(module)
    return "", []
