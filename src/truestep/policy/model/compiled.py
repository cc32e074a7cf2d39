"""Layers that torch.compile has made: their norms, rotary embeddings, activations and casts in a few kernels.

A layer is compiled for training alone: where no gradient is wanted (probes, sampling, evaluation) its own code runs.
Layers of one kind share what was compiled, and so do micro-batches of any size. Attention is a call from compiled code
into ours, which sees where documents lie; no guard ever depends on that. Recomputation stays outside: what is compiled
is what is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

BACKEND = "inductor"


def compile_layers(layers: Iterable[torch.nn.Module]) -> None:
    """In place; names and weights stay as they are, and hooks stay outside."""
    for layer in layers:
        layer.forward = _for_training(layer)


def _for_training(layer: Any) -> Any:
    plain = layer.forward
    # Later transformers recompute in `forward`, around what this attribute holds; earlier ones around all of `forward`.
    recomputing = plain.__func__.__code__.co_name == "forward_with_checkpointing"
    inner = plain.__func__.__wrapped__.__get__(layer) if recomputing else plain
    compiled = torch.compile(inner, dynamic=True, backend=BACKEND)

    @functools.wraps(plain)
    def forward(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*arguments, **options)
        if recomputing and layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(functools.partial(compiled, **options), *arguments)
        return compiled(*arguments, **options)

    return forward
