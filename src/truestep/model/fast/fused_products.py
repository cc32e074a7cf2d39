"""Products of the same rows with several weights, as one product: queries, keys and values, or the two wide products of
an MLP. With few rows a product takes a GPU little more than it takes to begin one.

In what torch compiles of a layer such products become one operator. It makes one product where the weights lie one
behind another in memory, and as many as there are weights where they do not. Which weights meet in a layer, the layer's
own compiled code tells when it runs.

In training the gradient of what was multiplied is the sum of several products in the same way, and it is one product of
what lies side by side (`adding.joined_backward`): it is added up in float32, and written and read once.

Dimensions: R rows, K inner, N of all weights together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from truestep.gpu.operators import operator

_noted: list[list[torch.Tensor]] | None = None


@contextmanager
def noting() -> Iterator[list[list[torch.Tensor]]]:
    """Note, inside, the weights of each product that could be one and is several."""
    global _noted
    found: list[list[torch.Tensor]] = []
    _noted = found
    try:
        yield found
    finally:
        _noted = None


def result_of(a: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make the memory of a result."""
    return a.new_empty(a.shape[0], sum(weight.shape[0] for weight in weights))


@operator("joined_product(Tensor a, Tensor[] weights) -> Tensor", result_of)
def joined_product(a: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:  # [R, K] -> [R, N]
    """Multiply rows by several weights."""
    whole = as_one(weights)
    if whole is not None:
        return a @ whole.T
    if _noted is not None:
        _noted.append(weights)
    result = result_of(a, weights)
    for weight, part in zip(weights, result.split([len(weight) for weight in weights], dim=1), strict=True):
        torch.mm(a, weight.T, out=part)
    return result


@operator("add_product_(Tensor(a!) onto, Tensor a, Tensor weight) -> ()", lambda *_: None)
def add_product_(onto: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> None:  # [.., R, N], [R, K], [N, K]
    """Add a product to rows, in place: the sum is rounded once."""
    onto.view(len(a), len(weight)).addmm_(a, weight.T)


@operator("side_by_side(Tensor[] parts) -> Tensor", lambda parts: torch.cat(parts, -1))
def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:  # [..., N of a part] -> [..., N of all]
    """Lay results side by side. In compiled code what makes a part writes it to its place."""
    return torch.cat(parts, -1)


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View matrices as one that has the rows of all; None: they do not lie one behind another."""
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return None
        end += weight.nbytes
    # Memory of another tensor may happen to lie behind the first one's.
    if end > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return None
    return first.as_strided((sum(weight.shape[0] for weight in weights), first.shape[1]), (first.shape[1], 1))
