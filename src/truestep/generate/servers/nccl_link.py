"""The trainer's end of an NCCL group with one server, which sends weights from host memory to the server's GPUs.

The weights stay in host memory until the server takes them. So a slow or recovered server gets the same weights, and
training does not wait for it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from truestep.generate.errors import UnreachableError
from truestep.generate.servers.host_copies import HostWeights
from truestep.weight_transfer.link import CHUNK, LinkError, Sender, Wire, join
from truestep.weight_transfer.packed import Entry, update_info

Ask = Callable[[dict[str, Any]], Awaitable[Any]]


class ServerWire(Wire, Protocol):
    """A wire to a server."""

    def init_info(self, ranks: int, chunk: int) -> dict[str, Any]:
        """Return the `init_info` with which a server of `ranks` ranks joins the group."""
        ...

    def beside(self) -> AbstractContextManager[Any]:
        """Run the block's transfers on a side stream."""
        ...

    def abandon(self) -> None:
        """Leave the group, even if a transfer is in flight."""
        ...


class Link:
    """A group of the trainer and one server."""

    def __init__(self, wire: ServerWire, patience: float, chunk: int = CHUNK):
        """`patience`: most seconds for one message; `chunk`: bytes of a message."""
        self._wire, self._patience, self._chunk = wire, patience, chunk

    async def join(self, ranks: int, ask: Ask) -> None:
        """Invite the server by `ask`, and wait until all its ranks have joined."""
        answer = _begun(ask(self._wire.init_info(ranks, self._chunk)))
        try:
            await asyncio.to_thread(join, self._wire, ranks, answer, self._patience)
        except LinkError as error:
            raise UnreachableError(str(error)) from error

    async def send(self, weights: HostWeights, announce: Ask) -> None:
        """Send weights to the server, which receives them while it handles the request `announce`."""
        entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.tensors.items()]
        answer = _begun(announce(update_info(entries)))
        await asyncio.to_thread(self._send, entries, weights, answer)
        await asyncio.wrap_future(answer)

    def _send(self, entries: list[Entry], weights: HostWeights, answer: "Future[Any]") -> None:
        def watch() -> None:
            if answer.done():
                answer.result()  # raises if the server refused: it will not receive anything

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
        with contextlib.suppress(LinkError):  # the group may be broken
            self._wire.abandon()


def _begun(work: Awaitable[Any]) -> "Future[Any]":
    """Start work in the running event loop. Return a future that another thread can read."""

    async def done() -> Any:
        return await work

    return asyncio.run_coroutine_threadsafe(done(), asyncio.get_running_loop())
