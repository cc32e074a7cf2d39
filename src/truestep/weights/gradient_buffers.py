"""A table of weights whose gradients are added to float32 buffers by kernels, not by autograd. Each weight has a
number. Operators in compiled code take the number, and look up the weight and the owner of its buffer in the table."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

_ALIGNMENT = 16  # bytes


class Buffers(Protocol):
    """The owner of gradient buffers."""

    def add_product(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `gradient.T @ rows` to a parameter's gradient buffer: [tokens, N], [tokens, K]."""

    def add_grouped(
        self, parameter: torch.nn.Parameter, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor
    ) -> None:
        """Add `first[rows].T @ second[rows]` to each matrix m of a parameter's gradient buffer. The rows of matrix m
        end at `ends[m]`."""

    def lay_together(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Move each group of parameters to contiguous memory."""


_numbers = itertools.count()
_table: dict[int, tuple[weakref.ref[Any], weakref.ref[torch.nn.Parameter]]] = {}


def enter(owner: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Enter a parameter and the owner of its gradient buffer. Return the parameter's number as a tensor on the host.
    For compiled code a tensor is an input, so all layers share the code; an int would be a constant."""
    number = next(_numbers)
    _table[number] = weakref.ref(owner), weakref.ref(parameter, lambda _: _table.pop(number, None))
    return torch.tensor(number)


def entry(number: int) -> tuple[Any, torch.nn.Parameter]:
    """Return the buffer's owner and the parameter with this number."""
    owner, parameter = (found() for found in _table.get(number, (_nobody, _nobody)))
    if owner is None or parameter is None:
        raise RuntimeError("a weight that adds its own gradient was replaced or let go of before its backward pass")
    return owner, parameter


def _nobody() -> Any:
    return None


def runs_of(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the index and the rows of each run that is not empty. On a GPU this is a host-device sync."""
    for number, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if end > start:
            yield number, slice(start, end)


def aligned(*operands: torch.Tensor) -> bool:
    """Tell whether kernels that copy blocks of 16 bytes can read these matrices."""
    return all(
        operand.is_contiguous()
        and operand.numel() > 0
        and operand.shape[-1] * operand.itemsize % _ALIGNMENT == 0
        and operand.data_ptr() % _ALIGNMENT == 0
        for operand in operands
    )
