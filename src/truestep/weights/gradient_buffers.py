"""Who keeps the gradient of a weight whose gradient autograd does not see, found by where the weight lies in memory."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch


class Buffers(Protocol):
    """What keeps the gradients."""

    def add_product(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `gradient.T @ rows` to the gradient of a parameter: [tokens, N], [tokens, K]."""

    def lay_together(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Have each group of parameters lie one behind another in memory."""


# By the address of a weight: who keeps its gradient, and the parameter.
_keepers: dict[int, tuple[weakref.ref[Any], weakref.ref[torch.nn.Parameter]]] = {}


def forget_the_gone() -> None:
    """Forget parameters that are no more."""
    for place in [place for place, (_, parameter) in _keepers.items() if parameter() is None]:
        del _keepers[place]


def keep(keeper: Any, parameter: torch.nn.Parameter) -> None:
    """Remember who keeps a parameter's gradient, by where it lies."""
    _keepers[parameter.data_ptr()] = weakref.ref(keeper), weakref.ref(parameter)


def keeper_of(weight: torch.Tensor) -> tuple[Any, torch.nn.Parameter]:
    """Find who keeps the gradient of a parameter that lies where this weight does, and the parameter."""
    found = _keepers.get(weight.data_ptr())
    keeper, parameter = (None, None) if found is None else (found[0](), found[1]())
    if keeper is None or parameter is None:
        raise RuntimeError(
            "a weight that adds its own gradient was copied, moved or let go of before its backward pass"
        )
    return keeper, parameter


def moved(parameter: torch.Tensor, before: int) -> None:
    """Find a parameter where it lies now; it lay at `before`."""
    found = _keepers.get(before)
    if found is not None and found[1]() is parameter:
        _keepers[parameter.data_ptr()] = _keepers.pop(before)
