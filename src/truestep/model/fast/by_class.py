"""Replaces a model's own modules by ours, by changing their class.

A module keeps its attributes, names, weights and hooks. Its class becomes a subclass of our class and its own class.
Our forward pass runs only in compiled code. Elsewhere, such as in the probes, the model's own forward pass runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from truestep.model.adapter import LoraLinear

_own_code = False


@contextmanager
def own_code() -> Iterator[None]:
    """Use the model's own forward passes within the block, in compiled code too."""
    global _own_code
    before, _own_code = _own_code, True
    try:
        yield
    finally:
        _own_code = before


def acts() -> bool:
    """Tell whether our forward pass should run: only in compiled code, and not within `own_code`."""
    return torch.compiler.is_compiling() and not _own_code


def ours_runs() -> bool:
    """Tell whether a forward pass of ours that also runs in eager code should run: not within `own_code`."""
    return not _own_code


def put_in(module: Any, ours: Any, **attributes: Any) -> None:
    """Make a module's class a subclass of our class and its own, and set our attributes."""
    theirs: Any = type(module)
    module.__class__ = _joined(ours, theirs)
    for name, value in attributes.items():
        setattr(module, name, value)


@cache
def _joined(ours: Any, theirs: Any) -> type[torch.nn.Module]:
    return type(theirs.__name__, (ours, theirs), {"__module__": theirs.__module__})


def is_product(module: Any) -> bool:
    """Tell whether a module is a linear layer that runs its own class's forward pass, maybe with an adapter."""
    linear = isinstance(module, LoraLinear) or type(module) is torch.nn.Linear
    return linear and "forward" not in vars(module)
