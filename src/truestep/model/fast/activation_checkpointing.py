"""Activation checkpointing: recomputes all of a layer's activations, or only the cheap ones.

`selective` keeps attention's outputs, and products whose input and output width are about equal (queries, attention's
output projection). Wide MLP products, norms and elementwise operations are recomputed. `elementwise` keeps all matrix
products, except those inside an attention made of plain products. Kept values are the forward pass's own tensors, so
results do not change.

Compiled layers do not use this for `elementwise`: the compiler selects what to keep (`compiler_backends`).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from truestep.model.handed import HandedAgain
from truestep.weights.errors import ModelError

FULL, SELECTIVE, ELEMENTWISE = "full", "selective", "elementwise"
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_GROUPED = ("aten::_grouped_mm", "truestep::grouped_product")  # grouped products of experts, transformers' and ours
# Operations that choose a token's experts. Recomputed with other rounding, they might choose other experts.
_CHOICES = ("aten::topk", "truestep::top_experts", "truestep::sorted_by_expert", "truestep::choices_over_ranks")
_NARROW = 2  # `selective` keeps a product if its wider side is at most this multiple of the narrower


def recompute_activations(model: Any, options: Mapping[str, Any]) -> None:
    """Switch on transformers' recomputation of each layer in the backward pass, by `checkpoint_options`."""
    if not model.supports_gradient_checkpointing:
        raise ModelError(f"{type(model).__name__} does not support model.activation_checkpointing")
    options = dict(options)
    if hasattr(model, "activation_checkpointing_enable"):  # since about transformers 5.20
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # layers recompute in training mode only; their children stay in evaluation mode, without dropout
            module.training = True


def checkpoint_options(how: str, choices_kept: bool = False) -> dict[str, Any]:
    """Return options for `torch.utils.checkpoint`. `choices_kept`: `full` also saves the choices of experts."""
    return {"use_reentrant": False, "context_fn": partial(_contexts, how, choices_kept)}


def _contexts(how: str, choices_kept: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make the contexts in which a layer is computed and recomputed."""
    plain = nullcontext(), nullcontext()
    keeps_some = how != FULL or choices_kept
    computed, again = create_selective_checkpoint_contexts(partial(_policy, how)) if keeps_some else plain
    return computed, HandedAgain(again)


def _policy(how: str, context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = _name_of(operation) in _CHOICES
    if how != FULL:
        kept = kept or is_kept(operation, arguments) or (how == ELEMENTWISE and is_product(operation))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def is_product(operation: Any) -> bool:
    """Tell whether an operation is a matrix product, also one of experts."""
    return operation in PRODUCTS or _name_of(operation) in _GROUPED


def _name_of(operation: Any) -> str:
    return str(getattr(operation, "name", lambda: "")())


def is_kept(operation: Any, arguments: Any) -> bool:
    """Tell whether `selective` keeps an operation's output."""
    if operation in PRODUCTS:
        inner, outer = arguments[-1].shape  # the last argument is the weight
        return bool(max(inner, outer) <= _NARROW * min(inner, outer))
    name = _name_of(operation)
    return name in _CHOICES or (("attention" in name or "attn" in name) and "backward" not in name)
