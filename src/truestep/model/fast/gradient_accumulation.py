"""Gradient accumulation in float32 for weights of compiled layers: the product adds directly to a float32 buffer.

No weight gradient is written in half precision and read again. A GPU's tensor cores accumulate in float32 anyway.
Autograd does not see the weight. In the backward pass, an operator returns the input's gradient, and as a side effect
adds the weight's gradient to its buffer, which it finds by the weight's address (`gradient_buffers`).

Dimensions: N outputs, K inputs.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from truestep.gpu.operators import operator
from truestep.model.adapter import LoraLinear
from truestep.model.fast.fused_products import as_one
from truestep.weights.gradient_buffers import Buffers, forget_the_gone, keep, keeper_of

_numbers = itertools.count()


def next_number() -> int:
    """Return a unique number, which keeps the compiler from merging equal calls of an operator."""
    return next(_numbers)


@operator(
    "linear_backward(Tensor gradient, Tensor x, Tensor weight, int number) -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
@torch.no_grad()
def linear_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
    """Return the input's gradient, [..., K], and add the weight's, [N, K], to its buffer. `number` is unique per call,
    because a compiler merges equal calls."""
    _add(gradient, x, weight)
    return gradient @ weight


@operator(
    "joined_backward(Tensor gradient, Tensor x, Tensor[] weights, int number, Tensor[] after) -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
def joined_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], number: int, after: list[torch.Tensor]
) -> torch.Tensor:
    """Compute `linear_backward` for several weights with the same input. `gradient` has their outputs' gradients,
    concatenated. `after`: results of `matrices_backward`, as a dependency: those calls run before this one."""
    matrices_backward(gradient, x, weights, number)
    return rows_backward(gradient, weights)


@operator(
    "rows_backward(Tensor gradient, Tensor[] weights) -> Tensor",
    lambda gradient, weights: gradient.new_empty(*gradient.shape[:-1], weights[0].shape[1]),
)
@torch.no_grad()
def rows_backward(gradient: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of the common input of several weights."""
    whole = as_one(weights)
    if whole is not None:
        return gradient @ whole
    first, *others = gradient.split([len(weight) for weight in weights], -1)
    result = first @ weights[0]
    for part, weight in zip(others, weights[1:], strict=True):
        result += part @ weight
    return result


@operator(
    "matrices_backward(Tensor gradient, Tensor x, Tensor[] weights, int number) -> Tensor",
    lambda _, x, *__: x.new_empty(0),
)
@torch.no_grad()
def matrices_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], number: int
) -> torch.Tensor:
    """Add the gradients of several weights to their buffers. The result is empty; it only expresses a dependency."""
    for part, weight in zip(gradient.split([len(weight) for weight in weights], -1), weights, strict=True):
        _add(part, x, weight)
    return x.new_empty(0)


def _add(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    keeper, parameter = keeper_of(weight)
    keeper.add_product(parameter, gradient.flatten(0, -2), x.flatten(0, -2))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.truestep.linear_backward(gradient, *ctx.saved_tensors, next_number()), None


@torch.compiler.allow_in_graph  # not traced here; autograd traces the backward pass, with unique numbers
def _product(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return _Product.apply(x, weight)


class AddingLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            found: torch.Tensor = _product(x, self.weight.detach())
            return found
        return super().forward(x)


def add_in_products(layers: Iterable[torch.nn.Module], keeper: Buffers, kept: Iterable[torch.nn.Parameter]) -> None:
    """Replace the plain linear layers of `layers` by `AddingLinear`, if `keeper` has buffers for their weights."""
    forget_the_gone()
    wanted = set(kept)
    found = [module for layer in layers for module in called(layer)]
    for module in found:
        if type(module) is not torch.nn.Linear or "forward" in vars(module) or module.bias is not None:
            continue
        if module.weight in wanted:
            module.__class__ = AddingLinear
            keep(keeper, module.weight)
    keeper.lay_together(group for module in found for group in _side_by_side(module))


def _side_by_side(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield groups of a module's consecutive linear layers with equal input size, which may have the same input. If
    they do not, only their placement in memory is affected."""
    products = [child for child in module.children() if isinstance(child, AddingLinear)]
    for _, group in itertools.groupby(products, lambda child: child.in_features):
        matrices: list[torch.Tensor] = [child.weight for child in group]
        if len(matrices) > 1:
            yield matrices


def called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and its called descendants. A `LoraLinear` does not call its children; it reads their weights."""
    yield module
    if not isinstance(module, LoraLinear):
        for child in module.children():
            yield from called(child)
