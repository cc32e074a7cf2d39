"""Recomputation of a layer's activations: all of them, or those that are cheap to make again.

`selective` keeps what attention gives, and the products that leave a token's width about as it is (queries, the output
of attention). The wide products of the neurons, norms and elementwise work are made again. `elementwise` keeps all
products, but not those inside an attention that is made of them. A kept value is the very tensor that the forward pass
made, so no number changes.

Compiled layers need nothing of this for `elementwise`: the compiler decides what a layer keeps (`joining`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from truestep.weights.errors import ModelError

FULL, SELECTIVE, ELEMENTWISE = "full", "selective", "elementwise"
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# With those of experts, of which each multiplies tokens of its own.
ALL_PRODUCTS = (*PRODUCTS, torch.ops.aten._grouped_mm.default)
_NARROW = 2  # a product's wider side is at most so many times the other one


def recompute_activations(model: Any, how: str = FULL) -> None:
    """Have transformers recompute each layer in the backward pass."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(f"{type(model).__name__} does not support model.activation_checkpointing")
    options = checkpoint_options(how)
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20 or so
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
    model.train()  # transformers recomputes in training mode only; there is no dropout left to switch on


def checkpoint_options(how: str) -> dict[str, Any]:
    """Give the options of torch's checkpoint."""
    contexts: dict[str, Callable[[], Any]] = {}
    if how != FULL:
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, partial(_policy, how))}
    return {"use_reentrant": False, **contexts}


def _policy(how: str, context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = is_kept(operation, arguments) or (how == ELEMENTWISE and operation in ALL_PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(operation: Any, arguments: Any) -> bool:
    """Tell whether selective recomputation keeps what an operation gives."""
    if operation in PRODUCTS:
        inner, outer = arguments[-1].shape  # the last argument is the weight
        return bool(max(inner, outer) <= _NARROW * min(inner, outer))
    name = str(getattr(operation, "name", lambda: "")())
    return ("attention" in name or "attn" in name) and "backward" not in name
