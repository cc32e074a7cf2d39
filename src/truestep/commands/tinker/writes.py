"""Writes to the disk in threads of their own, so that a slow disk of one tenant stops nobody else.

Each model, each session and each tenant has an `Order`: what it writes is written in the order of the calls.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


class Stopped(BaseException):
    """The server ends: what waits is neither done, nor written to the journal as failed, nor told."""


class Order:
    """Work that is done in the order of the calls. A thread does it, and ends when there is no more. The process does
    not wait for it at its end, as a disk may hang."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._going = False

    def do(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._going:
                return
            self._going = True
        try:
            threading.Thread(target=self._run, name="writes", daemon=True).start()
        except RuntimeError:  # there are too many threads: the caller waits for the disk
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._going = False
                    return
                work = self._waiting.popleft()
            work()
            del work  # it may hold a model that has ended


class Writes:
    """All that is being written, or waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = 0
        self._stopped = False

    def do(self, order: Order, work: Callable[[], T]) -> "Future[T]":
        """Do work after all earlier work of this order, with the calling thread's device."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        future: Future[T] = Future()

        def done() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    if device is not None:
                        torch.cuda.set_device(device)
                    self.check_going()
                    future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self._count(-1)

        self.check_going()
        self._count(1)
        order.do(done)
        return future

    def check_going(self) -> None:
        """Raise if the server ends."""
        if self._stopped:
            raise Stopped

    def _count(self, change: int) -> None:
        with self._changed:
            self._open += change
            self._changed.notify_all()

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until all is written. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)

    def stop(self, seconds: float) -> bool:
        """Begin no more work, and wait so long for what was begun. Return whether it has ended."""
        self._stopped = True
        return self.settle(seconds)
