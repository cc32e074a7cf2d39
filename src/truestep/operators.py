"""Operators of ours in compiled code: the compiler takes them as they are."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("truestep", "FRAGMENT")

Compute = Callable[..., torch.Tensor]


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
