"""Gradients of compiled layers' matrices, which the products that make them add to float32 buffers: none is written in
half precision, rounded and read again. A GPU's matrix unit adds in float32 anyway.

Autograd does not see such a matrix. The layer's own backward pass has an operator that gives the gradient of what was
multiplied, and adds the matrix's on the way. It finds the buffer by where the matrix lies.

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
    """Give a number that no other call has."""
    return next(_numbers)


@operator(
    "linear_backward(Tensor gradient, Tensor x, Tensor weight, int number) -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
@torch.no_grad()
def linear_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
    """Give the gradient of what was multiplied, [..., K], and add that of the matrix, [N, K], to its buffer. `number`
    is another one wherever it is called: a compiler takes equal calls for one."""
    _add(gradient, x, weight)
    return gradient @ weight


@operator(
    "joined_backward(Tensor gradient, Tensor x, Tensor[] weights, int number, Tensor[] after) -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
def joined_backward(
    gradient: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], number: int, after: list[torch.Tensor]
) -> torch.Tensor:
    """Do the same for several matrices, whose gradients lie side by side: what was multiplied is the same. `after` has
    what `matrices_backward` gave: it is done before this."""
    matrices_backward(gradient, x, weights, number)
    return rows_backward(gradient, weights)


@operator(
    "rows_backward(Tensor gradient, Tensor[] weights) -> Tensor",
    lambda gradient, weights: gradient.new_empty(*gradient.shape[:-1], weights[0].shape[1]),
)
@torch.no_grad()
def rows_backward(gradient: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Give the gradient of what several matrices multiplied."""
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
    """Add the gradients of several matrices to their buffers. What it gives has no numbers: who takes it, waits."""
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


@torch.compiler.allow_in_graph  # the backward pass is traced as it runs, with its numbers
def _product(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return _Product.apply(x, weight)


class AddingLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            found: torch.Tensor = _product(x, self.weight.detach())
            return found
        return super().forward(x)


def add_in_products(layers: Iterable[torch.nn.Module], keeper: Buffers, kept: Iterable[torch.nn.Parameter]) -> None:
    """Have the layers' plain matrices add their gradients so, if the keeper has buffers for them."""
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
    """List the matrices of a module's own products, one after another, which multiply vectors of one size: maybe the
    same vectors. Nothing but the place of a matrix depends on it."""
    products = [child for child in module.children() if isinstance(child, AddingLinear)]
    for _, group in itertools.groupby(products, lambda child: child.in_features):
        matrices: list[torch.Tensor] = [child.weight for child in group]
        if len(matrices) > 1:
            yield matrices


def called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """List the modules that are called: a layer with an adapter reads the matrices of its own."""
    yield module
    if not isinstance(module, LoraLinear):
        for child in module.children():
            yield from called(child)
