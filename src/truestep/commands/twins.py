"""Asynchronous twins of methods, computed in a thread of their own, one after another, in the order of calls."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

# One thread for all sessions of a process: they share the device, and the ranks make their calls in one order.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="session")


def twin(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the asynchronous twin of a method. The device is that of the thread that calls it."""

    @wraps(method)
    async def asynchronous(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def compute() -> R:
            if device is not None:
                torch.cuda.set_device(device)
            return method(self, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(_THREAD, compute)

    return asynchronous
