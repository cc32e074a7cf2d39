"""Operators of ours in compiled code, which the compiler takes as they are, and where kernels of ours run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

_LIBRARY = torch.library.Library("truestep", "FRAGMENT")

Compute = TypeVar("Compute", bound=Callable[..., Any])


def operator(signature: str, result: Callable[..., Any]) -> Callable[[Compute], Compute]:
    """Register an operator `truestep::NAME`, and what the compiler has to know of its result. It runs inside the
    compiled pass of every layer, so it goes by the shortest way that torch has: no gradient passes it."""

    def register(compute: Compute) -> Compute:
        name = signature.partition("(")[0]
        _LIBRARY.define(signature)
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"truestep::{name}", result, lib=_LIBRARY)
        return compute

    return register


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Have kernels run on a device, inside: Triton takes the current one, whatever tensors it is given."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
