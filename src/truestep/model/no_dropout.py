"""The settings of a transformers model for training: it draws nothing."""

from typing import Any

import torch


def no_noise(model: Any) -> None:
    """Set dropout and jitter to 0: a score is a function of the weights."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # `attention_dropout`, `dropout`, `layerdrop`: numbers that a forward pass in training mode would use.
        for name, value in vars(module).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
