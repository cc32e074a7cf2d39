"""All servers: who gets the next request, which weights each of them has, and what becomes of one that is lost.

An answer counts only once a probe that began after it has shown that its server still has the weights it was given
(`confirm`): a server that was restarted in between serves the weights it was started with, and says nothing of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from truestep.sampler.server import sync
from truestep.sampler.server.answer import Asked, Choice
from truestep.sampler.server.check import explain_raw
from truestep.sampler.server.client import Client
from truestep.sampler.server.errors import BadAnswerError, ServerError, UnreachableError, VoidedError, WeightsError
from truestep.sampler.server.probe import Expected, measure

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds between attempts to reach a lost server
_PATIENCE = 3  # attempts after which its unconfirmed answers are given up for others to make
_REMEMBERED = 4  # versions that a server may still have


@dataclass(frozen=True)
class Published:
    """Weights on the disk, and what the trainer says with them."""

    path: Path
    expected: Expected

    @property
    def version(self) -> int:
        return self.expected.version


@dataclass(eq=False)
class Server:
    client: Client
    version: int | None = None  # of the weights that it was given last
    is_open: bool = False  # to requests
    epoch: int = 0  # counts what makes the version of completions that are under way unknowable
    in_flight: int = 0  # completions
    served: int = 0
    confirmed: int = 0  # answers up to this serial number were made by the weights that they say
    voids: int = 0  # times that those behind it turned out to be of unknown weights
    lost_since: float | None = None
    trouble: str = ""  # the last one
    attempts: int = 0
    control: asyncio.Lock = field(default_factory=asyncio.Lock)  # one sync, probe or recovery at a time

    @property
    def url(self) -> str:
        return self.client.url


@dataclass(frozen=True)
class Answer:
    server: Server
    serial: int
    voids: int  # of the server when it came
    choices: list[Choice]

    @property
    def confirmed(self) -> bool:
        return self.serial <= self.server.confirmed

    @property
    def void(self) -> bool:
        return not self.confirmed and self.voids != self.server.voids


class Signal:
    """Wakes whoever waits at this moment."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def set(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class Fleet:
    def __init__(
        self,
        clients: Sequence[Client],
        *,
        pause: str,
        tolerance: float,
        timeout: float,
        on_void: Callable[[], None],
        on_fatal: Callable[[Exception], None],
    ):
        self.servers = [Server(client) for client in clients]
        self.version: int | None = None  # that every reachable server has
        self._pause, self._tolerance, self._timeout = pause, tolerance, timeout
        self._on_void, self._on_fatal = on_void, on_fatal
        self._published: dict[int, Published] = {}
        self._current: Published | None = None
        self._serial = 0
        self._changed = Signal()
        self._recoveries: set[asyncio.Task[None]] = set()

    # ---- completions

    async def ask(self, asked: Asked) -> Answer:
        server = await self._pick()
        version, epoch = server.version, server.epoch
        assert version is not None, "a server is opened with its first weights"
        server.in_flight += asked.n
        server.served += asked.n
        try:
            if self._pause == "keep":
                choices = await server.client.stream(asked, lambda: server.version or 0)
            else:
                choices = await server.client.complete(asked, version)
        except UnreachableError as error:
            self._lose(server, error)
            raise
        finally:
            server.in_flight -= asked.n
            self._changed.set()
        if server.epoch != epoch:
            raise VoidedError
        self._serial += 1
        return Answer(server, self._serial, server.voids, choices)

    async def _pick(self) -> Server:
        """The one that has least to do, and of equals the one that did least so far."""
        while not (ready := [server for server in self.servers if server.is_open]):
            await self._changed.wait()
        return min(ready, key=lambda server: (server.in_flight, server.served))

    # ---- weights

    async def publish(self, published: Published) -> None:
        self._current = published
        self._published[published.version] = published
        for old in list(self._published)[:-_REMEMBERED]:
            del self._published[old]
        await asyncio.gather(*(self._update(server, published) for server in self.servers))
        self.version = published.version
        self._changed.set()

    async def _update(self, server: Server, published: Published) -> None:
        async with server.control:
            if server.lost_since is not None:
                return  # whoever brings it back gives it the current weights
            try:
                self._close(server)
                if self._pause == "wait":
                    await self._drained(server)
                # A restart since the last probe would be covered up by the new weights.
                if server.version is not None and not await self._has_its_weights(server):
                    self._void(server)
                await self._load(server, published)
            except (UnreachableError, BadAnswerError) as error:
                self._lose(server, error)

    async def _load(self, server: Server, published: Published) -> None:
        client = server.client
        await sync.pause(client, self._pause, self._timeout)
        try:
            await sync.load(client, published.path, self._timeout)
            if self._pause != "keep":
                server.epoch += 1  # what still comes was under way while the weights changed
            server.version = published.version
        finally:
            await asyncio.shield(sync.resume(client, self._timeout))
        await self._verify(server, published)
        self._open(server)

    async def _verify(self, server: Server, published: Published) -> None:
        gap = await measure(server.client, published.expected, self._timeout)
        if raw := explain_raw(server.url, gap):
            raise WeightsError(raw)
        if gap.expected > self._tolerance:
            raise WeightsError(await self._explain(server, published, gap.expected))

    async def _explain(self, server: Server, published: Published, gap: float) -> str:
        said = (
            f"sampler.urls: {server.url} was given the weights of version {published.version}, and scores a probe of "
            f"{max(map(len, published.expected.prompts))} tokens {gap:.2g} nats away from the trainer (at most "
            f"{self._tolerance:g}, sampler.tolerance)"
        )
        fresh = await measure(server.client, published.expected, self._timeout, past_the_cache=True)
        if fresh.expected <= self._tolerance:
            return f"{said}: its prefix cache is that of older weights, although /reset_prefix_cache was called"
        for other in self._published.values():
            older = other.version != published.version
            if older and (await measure(server.client, other.expected, self._timeout)).expected <= self._tolerance:
                return f"{said}: it still serves those of version {other.version}, although reload_weights was called"
        return (
            f"{said}: does it compute as the trainer does (--dtype and model.dtype, the precision of the LM head, rope "
            "settings, quantisation)?"
        )

    async def _has_its_weights(self, server: Server) -> bool:
        """A probe; what was answered before it is confirmed if it is right."""
        mark, published = self._serial, self._published.get(-1 if server.version is None else server.version)
        if published is None:  # none yet, or so old that the trainer has forgotten them
            return False
        gap = await measure(server.client, published.expected, self._timeout)
        if gap.expected > self._tolerance:
            return False
        server.confirmed = max(server.confirmed, mark)
        return True

    async def confirm(self, servers: Collection[Server]) -> None:
        await asyncio.gather(*map(self._confirm, servers))

    async def _confirm(self, server: Server) -> None:
        async with server.control:
            if server.lost_since is not None:
                return
            try:
                if await self._has_its_weights(server):
                    return
                self._lose(server, UnreachableError("it no longer has the weights that it was given: it was restarted"))
            except (UnreachableError, BadAnswerError) as error:
                self._lose(server, error)

    async def _drained(self, server: Server) -> None:
        while server.in_flight:
            await self._changed.wait()

    def _open(self, server: Server) -> None:
        server.is_open, server.lost_since, server.attempts = True, None, 0
        self._changed.set()

    def _close(self, server: Server) -> None:
        server.is_open = False

    def _void(self, server: Server) -> None:
        """Nobody knows which weights made what is not confirmed."""
        server.epoch += 1
        server.voids += 1
        self._on_void()

    # ---- loss and recovery

    def _lose(self, server: Server, error: Exception) -> None:
        server.trouble = str(error)
        if server.lost_since is None:
            server.lost_since = time.time()
            self._close(server)
            task = asyncio.get_running_loop().create_task(self._recover(server))
            self._recoveries.add(task)
            task.add_done_callback(self._recoveries.discard)

    async def _recover(self, server: Server) -> None:
        delay = _FIRST_DELAY
        while True:
            await asyncio.sleep(delay)
            try:
                async with server.control:
                    await self._bring_back(server)
                    return
            except WeightsError as error:
                self._on_fatal(error)
                return
            except (UnreachableError, BadAnswerError, ServerError) as error:
                server.trouble = str(error)
                server.attempts += 1
                if server.attempts == _PATIENCE:
                    self._void(server)
            except Exception as error:  # a fault of ours must end the run, not this task alone
                self._on_fatal(error)
                return
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _bring_back(self, server: Server) -> None:
        """A server that answers again may be another process, which serves the weights that it was started with."""
        assert self._current is not None
        await server.client.get("/health", timeout=10)
        await sync.resume(server.client, self._timeout)  # a sync that was cut short left it standing still
        if not await self._has_its_weights(server):
            self._void(server)
            await self._load(server, self._current)
        elif server.version != self._current.version:
            await self._load(server, self._current)
        self._open(server)

    def report(self) -> str:
        """What each server is doing, for whoever waited in vain."""
        return "; ".join(map(_state, self.servers))

    async def close(self) -> None:
        for task in list(self._recoveries):
            task.cancel()
        await asyncio.gather(*self._recoveries, return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self.servers))


def _state(server: Server) -> str:
    if server.lost_since is not None:
        since = time.strftime("%H:%M:%S", time.localtime(server.lost_since))
        seconds = time.time() - server.lost_since
        return f"{server.url} is lost since {since} ({seconds:.0f} s, {server.attempts} attempts): {server.trouble}"
    trouble = f"; its last trouble: {server.trouble}" if server.trouble else ""
    state = "open" if server.is_open else "being given weights"
    return f"{server.url} is {state} with {server.in_flight} completions under way{trouble}"
