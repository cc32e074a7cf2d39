"""Layers compiled by torch: their norms, rotary embeddings, activations and casts in a few kernels.

A layer is compiled for training alone; without gradients (probes, sampling, evaluation) its own code runs. Layers of
one kind share the compiled code, and so do micro-batches of any size. Compiled code calls our attention, which knows
the documents' places; no guard depends on them. Recomputation stays outside, and recomputes compiled code.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import modeling_layers

from truestep.process import progress

BACKEND = "inductor"
FULLY: Mapping[str, Any] = {"use_reentrant": False}


def compile_layers(
    layers: Iterable[torch.nn.Module], options: Mapping[str, Any] = FULLY, *, remakes: bool = False
) -> None:
    """Compile layers in place; names and weights stay as they are, and hooks stay outside. `options` are those of
    torch's checkpoint, where layers are recomputed. If it `remakes`, a layer keeps for its backward pass its input and
    what products and attention give, and makes norms and elementwise work again."""
    for layer in layers:
        layer.forward = _for_training(layer, options, remakes)


def own_forward(layer: Any) -> Any:
    """Give a layer's own code, without what was put around it here or by its base class, which has nothing to compile:
    were it compiled too, one more frame would run."""
    forward = layer.forward
    if not hasattr(forward, "__func__"):
        forward = getattr(forward, "__wrapped__", forward)  # it is compiled for training
    wrapped = forward.__func__.__code__.co_filename == modeling_layers.__file__
    return forward.__func__.__wrapped__.__get__(layer) if wrapped else forward


def _for_training(layer: Any, options: Mapping[str, Any], remakes: bool) -> Any:
    plain = layer.forward
    # transformers recomputes around a layer or inside its `forward`, as its version has it: here it is done outside
    # what is compiled, and the layer is told to recompute nothing itself.
    recompute = getattr(layer, "gradient_checkpointing", False)
    if recompute:
        layer.gradient_checkpointing = False
    own, compiled = own_forward(layer), None

    def train(*arguments: Any, **named: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            from truestep.model.fast.fused_products_compiler import (
                training_backend,  # the compiler, which takes a second
            )

            compiled = torch.compile(own, dynamic=True, backend=training_backend(BACKEND, remakes))
        if recompute and layer.training:
            return checkpoint(functools.partial(compiled, **named), *arguments, **options)
        return compiled(*arguments, **named)

    ready = False

    @functools.wraps(plain)
    def forward(*arguments: Any, **options: Any) -> Any:
        nonlocal ready
        if not torch.is_grad_enabled():
            return plain(*arguments, **options)
        if ready:
            return train(*arguments, **options)
        with progress.working("compiling layers", "layers"):  # its first call; layers of one kind share the code
            result = train(*arguments, **options)
        ready = True
        return result

    return forward
