"""Turns off the dropout of a transformers model. Models compute in evaluation mode, where jitter is off."""

from typing import Any

import torch


def no_noise(model: Any) -> None:
    """Set dropout to 0, so that log-probs depend on the weights alone."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Floats such as `attention_dropout`, `dropout` and `layerdrop`, which forward passes in training mode use.
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
