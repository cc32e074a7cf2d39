"""The trainer's side of a link to the GPUs of one server: it sends weights that lie in the trainer's memory.

They lie there for the server to take whenever it can: a server that comes late or comes back gets the same ones, and
no rank that trains waits for it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from truestep.generate.servers.errors import UnreachableError
from truestep.generate.servers.host_copies import HostWeights
from truestep.publish.link import CHUNK, LinkError, Sender, Wire, join
from truestep.publish.packed import Entry, update_info

Ask = Callable[[dict[str, Any]], Awaitable[Any]]


class ServerWire(Wire, Protocol):
    """A wire that a server is invited to."""

    def init_info(self, ranks: int, chunk: int) -> dict[str, Any]:
        """Invite a server that has so many ranks."""
        ...

    def beside(self) -> AbstractContextManager[Any]:
        """Have what is queued inside run beside the other work of the trainer's device."""
        ...

    def abandon(self) -> None:
        """Leave, whatever is being sent."""
        ...


class Link:
    """A group that the trainer and one server are in."""

    def __init__(self, wire: ServerWire, patience: float, chunk: int = CHUNK):
        """`patience`: the seconds that one message may take; `chunk`: the bytes of one."""
        self._wire, self._patience, self._chunk = wire, patience, chunk

    async def join(self, ranks: int, ask: Ask) -> None:
        """Invite the server by `ask`, and wait until all its ranks are there."""
        answer = _begun(ask(self._wire.init_info(ranks, self._chunk)))
        try:
            await asyncio.to_thread(join, self._wire, ranks, answer, self._patience)
        except LinkError as error:
            raise UnreachableError(str(error)) from error

    async def send(self, weights: HostWeights, announce: Ask) -> None:
        """Send weights to the server, which takes them while it answers `announce`."""
        entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.tensors.items()]
        answer = _begun(announce(update_info(entries)))
        await asyncio.to_thread(self._send, entries, weights, answer)
        await asyncio.wrap_future(answer)

    def _send(self, entries: list[Entry], weights: HostWeights, answer: "Future[Any]") -> None:
        def watch() -> None:
            if answer.done():
                answer.result()  # it refused, and nobody will take what is sent

        sender = Sender(self._wire, self._chunk, self._patience, watch)
        try:
            with self._wire.beside():
                sender.begin(entries)
                sender.add(weights.tensors)
                sender.finish()
        except BaseException as error:
            answer.cancel()
            self.close()
            if isinstance(error, LinkError):
                raise UnreachableError(str(error)) from error
            raise

    def close(self) -> None:
        with contextlib.suppress(LinkError):  # a group that is broken is left all the same
            self._wire.abandon()


def _begun(work: Awaitable[Any]) -> "Future[Any]":
    """Have the loop that runs do the work, for another thread to look at."""

    async def done() -> Any:
        return await work

    return asyncio.run_coroutine_threadsafe(done(), asyncio.get_running_loop())
