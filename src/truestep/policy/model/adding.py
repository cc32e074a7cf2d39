"""Gradients of compiled layers' matrices, which the products that make them add to float32 buffers: none is written in
half precision, rounded and read again. A GPU's matrix unit adds in float32 anyway.

Autograd does not see such a matrix. The layer's own backward pass has an operator that gives the gradient of what was
multiplied, and adds the matrix's on the way. It finds the buffer by where the matrix lies.

Dimensions: N outputs, K inputs.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Buffers(Protocol):
    """What keeps the gradients."""

    def add_product(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `gradient.T @ rows` to the gradient of a parameter: [tokens, N], [tokens, K]."""


# By the address of a matrix: who keeps its gradient, and the parameter.
_keepers: dict[int, tuple[weakref.ref[Any], weakref.ref[torch.nn.Parameter]]] = {}

_LIBRARY = torch.library.Library("truestep", "FRAGMENT")
_LIBRARY.define("linear_backward(Tensor gradient, Tensor x, Tensor weight) -> Tensor")


@torch.no_grad()
def linear_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Give the gradient of what was multiplied, [..., K], and add that of the matrix, [N, K], to its buffer."""
    of_keeper, of_parameter = _keepers[weight.data_ptr()]
    keeper, parameter = of_keeper(), of_parameter()
    assert keeper is not None and parameter is not None, "the weights of this model are gone"
    keeper.add_product(parameter, gradient.flatten(0, -2), x.flatten(0, -2))
    return gradient @ weight


_LIBRARY.impl("linear_backward", linear_backward, "CompositeExplicitAutograd")
torch.library.register_fake("truestep::linear_backward", lambda _, x, __: x.new_empty(x.shape), lib=_LIBRARY)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.truestep.linear_backward(gradient, *ctx.saved_tensors), None


class AddingLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            found: torch.Tensor = _Product.apply(x, self.weight.detach())
            return found
        return super().forward(x)


def add_in_products(layers: Iterable[torch.nn.Module], keeper: Buffers, kept: Iterable[torch.nn.Parameter]) -> None:
    """Have the layers' plain matrices add their gradients so, if the keeper has buffers for them."""
    wanted = set(kept)
    for layer in layers:
        for module in layer.modules():
            plain = type(module) is torch.nn.Linear and "forward" not in vars(module) and module.bias is None
            if plain and module.weight in wanted:
                module.__class__ = AddingLinear
                keep(keeper, module.weight)  # type: ignore[arg-type]


def keep(keeper: Buffers, parameter: torch.nn.Parameter) -> None:
    """Remember who keeps a parameter's gradient, and where the parameter lies."""
    _keepers[parameter.data_ptr()] = weakref.ref(keeper), weakref.ref(parameter)


def moved(parameter: torch.nn.Parameter, before: int) -> None:
    """Find a parameter where it lies now; it lay at `before`."""
    found = _keepers.pop(before, None)
    if found is not None:
        _keepers[parameter.data_ptr()] = found
