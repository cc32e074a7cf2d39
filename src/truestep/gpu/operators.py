"""Custom operators for torch.compile, and the device on which Triton kernels run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

_LIBRARY = torch.library.Library("truestep", "FRAGMENT")

Compute = TypeVar("Compute", bound=Callable[..., Any])


def operator(signature: str, result: Callable[..., Any]) -> Callable[[Compute], Compute]:
    """Register an operator `truestep::NAME` without gradient. `result` is its fake implementation, which returns the
    result's shape and dtype. `torch.library.Library` has less overhead for each call than `custom_op`."""

    def register(compute: Compute) -> Compute:
        name = signature.partition("(")[0]
        _LIBRARY.define(signature)
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"truestep::{name}", result, lib=_LIBRARY)
        return compute

    return register


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current inside the block. Triton launches kernels on the current device, even if the tensors are on
    another one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
