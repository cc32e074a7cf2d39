"""The keys of the documents in progress, and the event loop of each document."""

import asyncio
import contextvars
import secrets
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from truestep.generate.endpoint.document import Document
from truestep.generate.generator import pass_on

T = TypeVar("T")
_KEY_BYTES = 24


@dataclass(eq=False)
class Served:
    """A document. Its requests are completed in the event loop, and with the context, in which this object was made."""

    document: Document
    posted: Callable[[], None] = lambda: None  # called in the event loop when a reward has been posted
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run a coroutine in that event loop, from another thread. Cancelling the future cancels the coroutine."""
        future: Future[T] = Future()

        def begin() -> None:
            task = self._loop.create_task(work(), context=self._context.copy())
            task.add_done_callback(lambda done: pass_on(done, future))
            future.add_done_callback(lambda done: self._cancel(task) if done.cancelled() else None)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop has ended
            future.cancel()
        return future

    def _cancel(self, task: "asyncio.Task[Any]") -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(task.cancel)


class Keys(Protocol):
    def find(self, key: str) -> Served | None:
        """Return the document of a key. Called from the endpoint's thread."""
        ...


class SecretKeys:
    """Keys that nobody can guess, one for each document."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, Served] = {}

    def add(self, served: Served) -> str:
        key = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"
        with self._lock:
            self._served[key] = served
        return key

    def remove(self, key: str) -> None:
        with self._lock:
            self._served.pop(key, None)

    def find(self, key: str) -> Served | None:
        with self._lock:
            return self._served.get(key)
