"""The settings of a transformers model for training: it draws nothing, and may recompute activations."""

from typing import Any

import torch

from truestep.policy.errors import ModelError


def no_noise(model: Any) -> None:
    """Set dropout and jitter to 0: a score is a function of the weights."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # `attention_dropout`, `dropout`, `layerdrop`: numbers that a forward pass in training mode would use.
        for name, value in vars(module).items():
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def recompute_activations(model: Any) -> None:
    if not model.supports_gradient_checkpointing:
        raise ModelError(f"{type(model).__name__} does not support model.activation_checkpointing")
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20 or so
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
    model.train()  # transformers recomputes in training mode only; there is no dropout left to switch on
