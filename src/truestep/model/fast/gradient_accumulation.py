"""Gradient accumulation in float32 for weights of compiled layers: the product adds directly to a float32 buffer.

No weight gradient is written in half precision and read again. A GPU's tensor cores accumulate in float32 anyway.
Autograd does not see the weight. In the backward pass, an operator returns the input's gradient, and as a side effect
adds the weight's gradient to its buffer, which it finds by the weight's number, its key in a table
(`gradient_buffers`).

If several weights share an input, the input's gradient is also one product, with the outputs' gradients concatenated.
It sums in float32 and writes the result once.

Dimensions: N outputs, K inputs.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.functional import linear

from truestep.gpu.operators import operator
from truestep.model.adapter import LoraLinear
from truestep.model.fast.fused_products import as_one
from truestep.weights.gradient_buffers import Buffers, enter, entry

_calls = itertools.count()


def next_call() -> int:
    """Return a unique number, which keeps the compiler from merging equal calls of an operator."""
    return next(_calls)


@operator(
    "products_backward(Tensor gradient, Tensor x, Tensor[] weights, Tensor numbers, int call, Tensor? after) -> Tensor",
    lambda _, x, *__: x.new_empty(x.shape),
)
def products_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    numbers: torch.Tensor,
    call: int,
    after: torch.Tensor | None,
) -> torch.Tensor:  # [..., N of all], [..., K] -> [..., K]
    """Return the gradient of the common input of several weights, and add the weights' gradients to their buffers.
    `gradient` has the outputs' gradients, concatenated. `after`: the result of a `matrices_backward` to run before."""
    matrices_backward(gradient, x, numbers, call)
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
    "matrices_backward(Tensor gradient, Tensor x, Tensor numbers, int call) -> Tensor", lambda _, x, *__: x.new_empty(0)
)
@torch.no_grad()
def matrices_backward(gradient: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor, call: int) -> torch.Tensor:
    """Add the gradients of several weights to their buffers. The result is empty; it only expresses a dependency."""
    entries = [entry(number) for number in numbers.flatten().tolist()]
    parts = gradient.flatten(0, -2).split([len(parameter) for _, parameter in entries], -1)
    for (owner, parameter), part in zip(entries, parts, strict=True):
        owner.add_product(parameter, part, x.flatten(0, -2))
    return x.new_empty(0)


@operator("side_by_side(Tensor[] parts) -> Tensor", lambda parts: torch.cat(parts, -1))
def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:  # [..., N of a part] -> [..., N of all]
    """Concatenate gradients. In compiled code, the kernels that compute the parts write directly to the result."""
    return torch.cat(parts, -1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, x: torch.Tensor, weight: torch.Tensor, number: torch.Tensor, inner: Any) -> torch.Tensor:
        saved.save_for_backward(x, weight, number)
        saved.splits = inner is not None
        return linear(x, weight)

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        (x, weight, number), ours = saved.saved_tensors, torch.ops.truestep
        if not saved.splits:
            return ours.products_backward(gradient, x, [weight], number, next_call(), None), None, None, None
        # With two operators, `x` recomputed for the weight's gradient can be computed later, in a kernel that reads the
        # same values.
        rows = ours.rows_backward(gradient, [weight])
        return rows, None, None, ours.matrices_backward(gradient, x, number, next_call())


# The forward pass is not traced; autograd traces the backward pass, where each call has a different number.
@torch.compiler.allow_in_graph
def product(x: torch.Tensor, weight: torch.Tensor, number: torch.Tensor, inner: torch.Tensor | None = None) -> Any:
    """Multiply by a weight that has a number. `inner`: the empty last result of `products`, if `x` is computed from its
    other results. In the backward pass, this weight's gradient is then added just before those of `products`."""
    return _Product.apply(x, weight, number, inner)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, x: torch.Tensor, numbers: torch.Tensor, *weights: torch.Tensor) -> Any:
        saved.save_for_backward(x, numbers, *weights)
        return *(linear(x, weight) for weight in weights), x.new_empty(0)

    @staticmethod
    def backward(saved: Any, *gradients: torch.Tensor) -> Any:
        x, numbers, *weights = saved.saved_tensors
        *parts, after = gradients
        ours = torch.ops.truestep
        rows = ours.products_backward(ours.side_by_side(parts), x, weights, numbers, next_call(), after)
        return rows, None, *(None for _ in weights)


@torch.compiler.allow_in_graph
def products(x: torch.Tensor, numbers: torch.Tensor, *weights: torch.Tensor) -> Any:
    """Multiply by several weights that have numbers. Return the results, and an empty tensor for `product`."""
    return _Products.apply(x, numbers, *weights)


class AddingLinear(torch.nn.Linear):
    number: torch.Tensor

    def forward(self, x: torch.Tensor, inner: torch.Tensor | None = None) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            found: torch.Tensor = product(x, self.weight.detach(), self.number, inner)
            return found
        return super().forward(x)


def add_in_products(layers: Iterable[torch.nn.Module], owner: Buffers, kept: Iterable[torch.nn.Parameter]) -> None:
    """Replace the plain linear layers of `layers` by `AddingLinear`, if `owner` has buffers for their weights."""
    wanted = set(kept)
    found = [module for layer in layers for module in called(layer)]
    for module in found:
        if type(module) is not torch.nn.Linear or "forward" in vars(module) or module.bias is not None:
            continue
        if module.weight in wanted:
            module.__class__ = AddingLinear
            module.number = enter(owner, module.weight)
    owner.lay_together(group for module in found for group in _side_by_side(module))


def numbers_of(layers: Iterable[torch.nn.Module]) -> torch.Tensor | None:
    """Return the numbers of linear layers' weights; None if a layer has none."""
    numbers = [layer.number for layer in layers if isinstance(layer, AddingLinear)]
    return torch.stack(numbers) if len(numbers) == len(list(layers)) else None


def _side_by_side(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield groups of a module's consecutive linear layers with equal input size, which may have the same input. If
    they do not, only their placement in memory is affected."""
    linears = [child for child in module.children() if isinstance(child, AddingLinear)]
    for _, group in itertools.groupby(linears, lambda child: child.in_features):
        matrices: list[torch.Tensor] = [child.weight for child in group]
        if len(matrices) > 1:
            yield matrices


def called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a module and its called descendants. A `LoraLinear` does not call its children; it reads their weights."""
    yield module
    if not isinstance(module, LoraLinear):
        for child in module.children():
            yield from called(child)
