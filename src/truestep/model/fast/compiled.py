"""Layers compiled by torch.compile: norms, RoPE, activations and casts are fused into few kernels.

Layers are compiled for training only; without gradients (probes, sampling, evaluation) their own code runs. Layers of
one kind, and micro-batches of any size, share compiled code. Compiled code calls our attention with the documents'
layout; no guard depends on the layout. Activation checkpointing wraps the compiled code.
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
    """Compile layers in place. Names and weights do not change; hooks are not compiled. `options`: for torch's
    checkpoint, if layers are recomputed. `remakes`: keep for the backward pass only a layer's input and the outputs of
    products and attention, and recompute norms and elementwise operations."""
    for layer in layers:
        layer.forward = _for_training(layer, options, remakes)


def own_forward(layer: Any) -> Any:
    """Return a layer's own forward, without our wrapper and that of its base class. Compiling a wrapper would only add
    a frame."""
    forward = layer.forward
    if not hasattr(forward, "__func__"):
        forward = getattr(forward, "__wrapped__", forward)  # our wrapper's original
    wrapped = forward.__func__.__code__.co_filename == modeling_layers.__file__
    return forward.__func__.__wrapped__.__get__(layer) if wrapped else forward


def _for_training(layer: Any, options: Mapping[str, Any], remakes: bool) -> Any:
    plain = layer.forward
    # Depending on its version, transformers recomputes around a layer or inside its `forward`. We recompute around the
    # compiled code, and switch the layer's own recomputation off.
    recompute = getattr(layer, "gradient_checkpointing", False)
    if recompute:
        layer.gradient_checkpointing = False
    own, compiled = own_forward(layer), None

    def train(*arguments: Any, **named: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            from truestep.model.fast.compiler_backends import recomputing_backend  # importing it takes a second

            compiled = torch.compile(own, dynamic=True, backend=recomputing_backend(BACKEND) if remakes else BACKEND)
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
        with progress.working("compiling layers", "layers"):  # the first call; layers of one kind share the code
            result = train(*arguments, **options)
        ready = True
        return result

    return forward
