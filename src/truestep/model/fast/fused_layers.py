"""Puts the fused attention and MLP in a model's layers."""

from typing import Any

import torch

from truestep.model.fast.fused_attention import FusedAttention, fuse_attention
from truestep.model.fast.fused_attention_gradient import kernel_serves
from truestep.model.fast.fused_mlp import FusedMLP, fuse_mlp
from truestep.model.fast.gradient_accumulation import numbers_of
from truestep.model.fast.rms_norm import AddingNorm
from truestep.weights.layers import layers_of


def fuse_layers(model: Any) -> None:
    """Replace attention and MLP modules if ours give the same results. The model's weights must not be unread, and its
    attention function must be `RECORD`."""
    for layer in layers_of(model)[1]:
        for module in list(layer.modules()):
            fuse_attention(module)
            fuse_mlp(module)


def head_norms_of(model: Any) -> set[torch.nn.Module]:
    """Return the norms of queries and keys that a fused kernel computes in training."""
    attentions = [module for module in model.modules() if isinstance(module, FusedAttention) and module.joins]
    return {norm for module in attentions if module.norm_form is not None for norm in module.head_norms}


def settle_layers(model: Any) -> None:
    """Switch joined products off where tensor parallelism has replaced a product's forward pass. Give the fused modules
    the keys of the weights whose gradients are added to float32 buffers."""
    for module in model.modules():
        if isinstance(module, FusedAttention | FusedMLP):
            module.joins = module.joins and not any("forward" in vars(layer) for layer in module.inner)
            module.numbers = numbers_of(module.inner)
        if isinstance(module, FusedAttention) and module.numbers is not None and _kernel_serves(module):
            module.numbers = torch.cat([module.numbers, *(norm.number[None] for norm in module.head_norms)])


def _kernel_serves(module: FusedAttention) -> bool:
    adds = module.norm_form is not None and all(isinstance(norm, AddingNorm) for norm in module.head_norms)
    return adds and kernel_serves(module.q_proj.weight.device, module.q_proj.weight.dtype)
