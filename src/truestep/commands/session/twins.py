"""Asynchronous twins of methods, computed in a thread of their own, one after another, in the order of calls.

A twin is no coroutine function: a call begins at once, and its future may be awaited later, or never.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class OneProcess(Protocol):
    def check_one_process(self) -> None:
        """Raise if there are several ranks, whose event loops would make their calls in different orders."""


S = TypeVar("S", bound=OneProcess)

# One thread for all sessions of a process, because they share the device.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="session")


def twin(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], "asyncio.Future[R]"]:
    """Return the asynchronous twin of a method. The device is that of the thread that calls it."""

    @wraps(method)
    def asynchronous(self: S, /, *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[R]":
        self.check_one_process()
        loop = asyncio.get_running_loop()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def compute() -> R:
            if device is not None:
                torch.cuda.set_device(device)
            return method(self, *args, **kwargs)

        return loop.run_in_executor(_THREAD, compute)

    return asynchronous
