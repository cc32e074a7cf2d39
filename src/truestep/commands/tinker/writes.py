"""Writes to the disk in threads of their own, so that a slow disk of one tenant stops nobody else.

Each model, each session and each tenant has an `Order`: what it writes is written in the order of the calls.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Order:
    """Work that is done in the order of the calls, in one thread, which begins with the first call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writes")

    def do(self, work: Callable[[], T]) -> "Future[T]":
        return self._thread.submit(work)


class Writes:
    """All that is being written, or waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = 0

    def do(self, order: Order, work: Callable[[], T]) -> "Future[T]":
        """Do work after what was given to the same order before. The device is that of the calling thread."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def done() -> T:
            if device is not None:
                torch.cuda.set_device(device)
            return work()

        self._count(1)
        try:
            future = order.do(done)
        except BaseException:
            self._count(-1)
            raise
        future.add_done_callback(lambda _: self._count(-1))
        return future

    def _count(self, change: int) -> None:
        with self._changed:
            self._open += change
            self._changed.notify_all()

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until all is written. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)
