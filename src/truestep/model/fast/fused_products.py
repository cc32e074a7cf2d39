"""Fuses products of the same input with several weights into one product: QKV, or the gate and up products of an MLP.

This helps with few rows, where launch time dominates. In a compiled layer these products become one operator. If the
weights are contiguous in memory, the operator computes one product; otherwise one product per weight. `noting` collects
the weights that compiled code fails to fuse, so that they can be moved together.

In training, the input's gradient is the sum of one product per weight. With the outputs' gradients concatenated it is
one product (`gradient_accumulation.joined_backward`), which sums in float32 and writes the result once.

Dimensions: R rows, K inner, N of all weights together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from truestep.gpu.operators import operator

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


@operator("add_product_(Tensor(a!) onto, Tensor a, Tensor weight) -> ()", lambda *_: None)
def add_product_(onto: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> None:  # [.., R, N], [R, K], [N, K]
    """Add a product to `onto` in place. The sum is rounded once."""
    onto.view(len(a), len(weight)).addmm_(a, weight.T)


@operator("side_by_side(Tensor[] parts) -> Tensor", lambda parts: torch.cat(parts, -1))
def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:  # [..., N of a part] -> [..., N of all]
    """Concatenate results. In compiled code, the kernels that compute the parts write directly to the result."""
    return torch.cat(parts, -1)


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
