"""One product of the same input with several weights: QKV, or the gate and up products of an MLP.

This helps with few rows, where launch time dominates. If the weights are contiguous in memory, the operator computes
one product; otherwise one product per weight. `noting` collects the weights of the latter, so that they can be moved
together.

Dimensions: R rows, K inner, N of all weights together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear

from truestep.gpu.operators import operator
from truestep.model.adapter import LoraLinear

_noted: list[list[torch.Tensor]] | None = None


@contextmanager
def noting() -> Iterator[list[list[torch.Tensor]]]:
    """Collect the weights of each fused operator that runs as several products within the block."""
    global _noted
    found: list[list[torch.Tensor]] = []
    _noted = found
    try:
        yield found
    finally:
        _noted = None


def result_of(a: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Allocate the result of a fused product."""
    return a.new_empty(a.shape[0], sum(weight.shape[0] for weight in weights))


@operator("joined_product(Tensor a, Tensor[] weights) -> Tensor", result_of)
def joined_product(a: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:  # [R, K] -> [R, N]
    """Multiply rows by the transposes of several weights, and concatenate the results."""
    whole = as_one(weights)
    if whole is not None:
        return a @ whole.T
    if _noted is not None:
        _noted.append(weights)
    result = result_of(a, weights)
    for weight, part in zip(weights, result.split([len(weight) for weight in weights], dim=1), strict=True):
        torch.mm(a, weight.T, out=part)
    return result


def products_of(
    x: torch.Tensor, layers: Sequence[torch.nn.Linear]
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:  # [..., K] -> [R, N], each [..., N of a layer]
    """Compute linear layers without a bias by one product. Return the product's rows, and each layer's output. The rows
    are None if a layer has an adapter: they are then not the outputs. The first products of the layers' adapters are
    fused, too."""
    adapted: list[Any] = [layer for layer in layers if isinstance(layer, LoraLinear) and layer.switch.on]
    weights = [layer.weight for layer in layers] + [layer.lora_A.weight for layer in adapted]
    rows: torch.Tensor = torch.ops.truestep.joined_product(x.flatten(0, -2), weights)
    parts = list(rows.view(*x.shape[:-1], -1).split([weight.shape[0] for weight in weights], -1))
    if not adapted:
        return rows, parts
    outputs, low = parts[: len(layers)], parts[len(layers) :]
    for layer, down in zip(adapted, low, strict=True):
        place = layers.index(layer)
        outputs[place] = outputs[place] + linear(down * layer.scale, layer.lora_B.weight)
    return None, outputs


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of several matrices as one with all of their rows; None if they are not contiguous in memory."""
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return None
        end += weight.nbytes
    # The next weight may be in another allocation that happens to follow the first one's.
    if end > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return None
    return first.as_strided((sum(weight.shape[0] for weight in weights), first.shape[1]), (first.shape[1], 1))
