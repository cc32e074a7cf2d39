"""A registry of weights whose gradients kernels, not autograd, add to a float32 buffer. Its key is a weight's address.

Compiled code passes tensors, not parameters, so the address identifies the parameter and the owner of its buffer."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch


class Buffers(Protocol):
    """The owner of gradient buffers."""

    def add_product(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `gradient.T @ rows` to a parameter's gradient buffer: [tokens, N], [tokens, K]."""

    def lay_together(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Move each group of parameters to contiguous memory, one after another."""


# The buffer's owner and the parameter, by the weight's address.
_keepers: dict[int, tuple[weakref.ref[Any], weakref.ref[torch.nn.Parameter]]] = {}


def forget_the_gone() -> None:
    """Remove parameters that no longer exist from the registry."""
    for place in [place for place, (_, parameter) in _keepers.items() if parameter() is None]:
        del _keepers[place]


def keep(keeper: Any, parameter: torch.nn.Parameter) -> None:
    """Register the owner of a parameter's gradient buffer."""
    _keepers[parameter.data_ptr()] = weakref.ref(keeper), weakref.ref(parameter)


def keeper_of(weight: torch.Tensor) -> tuple[Any, torch.nn.Parameter]:
    """Return the buffer's owner and the parameter registered at a weight's address."""
    found = _keepers.get(weight.data_ptr())
    keeper, parameter = (None, None) if found is None else (found[0](), found[1]())
    if keeper is None or parameter is None:
        raise RuntimeError(
            "a weight that adds its own gradient was copied, moved or let go of before its backward pass"
        )
    return keeper, parameter


def moved(parameter: torch.Tensor, before: int) -> None:
    """Update the registry for a parameter that moved from the address `before`."""
    found = _keepers.get(before)
    if found is not None and found[1]() is parameter:
        _keepers[parameter.data_ptr()] = _keepers.pop(before)
