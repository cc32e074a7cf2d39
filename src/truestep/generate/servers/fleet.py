"""The fleet of servers: who gets the next request, which weights each has, and what becomes of one that is lost.

An answer counts only once a probe that began after it has shown that its server still has the weights it was given
(`confirm`): a server that was restarted in between serves the weights it was started with, and says nothing of it.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truestep.generate.servers import check_answer as answer
from truestep.generate.servers.check import explain_raw
from truestep.generate.servers.errors import (
    BadAnswerError,
    ForgottenError,
    ServerError,
    UnreachableError,
    VoidedError,
    WeightsError,
)
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.probe import Expected, measure
from truestep.generate.servers.protocol import Choice, CompletionRequest, InferenceServer
from truestep.process import progress

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds between attempts to reach a lost server
_PATIENCE = 3  # attempts after which its unconfirmed answers are given up for others to make
_REMEMBERED = 4  # versions that a server may still have
_CLOSE_SECONDS = 10.0  # for servers that are paused to go on, when the run ends


@dataclass(frozen=True)
class Published:
    """New weights, and the trainer's scores of the probes with them."""

    weights: Path | HostWeights  # a directory, or what is sent
    expected: Expected

    @property
    def version(self) -> int:
        return self.expected.version


@dataclass(eq=False)
class Server:
    """A server, and the trainer's record of it."""

    remote: InferenceServer
    version: int | None = None  # of the weights that it loaded last
    is_open: bool = False  # to requests
    epoch: int = 0  # counts events after which nobody knows the version of completions that were under way
    in_flight: int = 0  # completions
    served: int = 0  # completions
    unconfirmed: list["Answer"] = field(default_factory=list)
    lost_at: float | None = None  # on the loop's clock; None: it is not lost
    trouble: str = ""  # the last one
    attempts: int = 0  # to bring it back
    control: asyncio.Lock = field(default_factory=asyncio.Lock)  # one sync, probe or recovery at a time

    @property
    def url(self) -> str:
        return self.remote.url

    def __str__(self) -> str:
        if self.lost_at is not None:
            seconds = asyncio.get_running_loop().time() - self.lost_at
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
            return f"{self.url} is lost since {since} ({seconds:.0f} s, {self.attempts} attempts): {self.trouble}"
        trouble = f"; its last trouble: {self.trouble}" if self.trouble else ""
        state = "open" if self.is_open else "being given weights"
        return f"{self.url} is {state} with {self.in_flight} completions under way{trouble}"


@dataclass(eq=False)
class Answer:
    """A group's completions. A later probe confirms them or makes them void, and that is final."""

    server: Server
    choices: list[Choice]
    confirmed: bool = False  # the weights that they name made them
    void: bool = False  # nobody knows which weights made them


class Signal:
    """An event that wakes those who wait when it is set, and nobody later."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def set(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class Fleet:
    """All servers: asks them, gives them weights, and brings back those that are lost."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        pause: str,
        tolerance: float,
        rolling: bool = False,
        on_void: Callable[[], None],
        on_fatal: Callable[[Exception], None],
    ):
        self.servers = [Server(remote) for remote in servers]
        self.version: int | None = None  # that every reachable server has
        self.last_progress = -math.inf  # on the loop's clock: a completion or loaded weights; an abort is neither
        self._pause, self._tolerance, self._rolling = pause, tolerance, rolling
        self._on_void, self._on_fatal = on_void, on_fatal
        self._published: dict[int, Published] = {}
        self._current: Published | None = None
        self._changed = Signal()
        self._tasks: set[asyncio.Task[None]] = set()  # each gives weights to a server, or brings one back

    async def ask(self, request: CompletionRequest) -> Answer:
        """Ask the server that has least to do."""
        server = await self._pick()
        version, epoch = server.version, server.epoch
        assert version is not None, "a server is opened with its first weights"
        server.in_flight += request.n
        server.served += request.n
        try:
            if self._pause == "keep":
                choices = await answer.stream(server.remote, request, lambda: server.version or 0)
            else:
                choices = await answer.complete(server.remote, request, version)
        except UnreachableError as error:
            self._lose(server, error)
            raise
        finally:
            server.in_flight -= request.n
            self._changed.set()
        if server.epoch != epoch:
            raise VoidedError
        if not all(choice.aborted for choice in choices):
            self.note_progress()
        server.unconfirmed.append(Answer(server, choices))
        return server.unconfirmed[-1]

    def note_progress(self) -> None:
        self.last_progress = asyncio.get_running_loop().time()
        progress.made("answers")

    async def _pick(self) -> Server:
        """Wait for an open server: the one that has least to do, and among equals the one that did least so far."""
        while not (ready := [server for server in self.servers if server.is_open]):
            await self._changed.wait()
        return min(ready, key=lambda server: (server.in_flight, server.served))

    async def publish(self, published: Published) -> None:
        """Give new weights to every server that is not lost."""
        self._current = published
        self._published[published.version] = published
        for old in list(self._published)[:-_REMEMBERED]:
            del self._published[old]
        if self._rolling:
            for server in self.servers:
                await self._begin(self._update(server, published))
        else:
            await asyncio.gather(*(self._begin(self._update(server, published)) for server in self.servers))
        self.version = published.version
        self._changed.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _update(self, server: Server, published: Published) -> None:
        async with server.control:
            if server.lost_at is not None:
                return  # whoever brings it back gives it the current weights
            try:
                await server.remote.prepare()  # it goes on sampling meanwhile
                server.is_open = False
                if self._pause == "wait":
                    await self._drained(server)
                # A restart since the last probe would be covered up by the new weights.
                if server.version is not None and not await self._has_its_weights(server):
                    self._void(server)
                await self._load(server, published)
            except (UnreachableError, BadAnswerError) as error:
                self._lose(server, error)

    async def _load(self, server: Server, published: Published) -> None:
        try:
            await server.remote.pause(self._pause)
            if isinstance(published.weights, HostWeights):
                await server.remote.send(published.weights)
            else:
                await server.remote.load(published.weights)
            if self._pause != "keep":
                server.epoch += 1  # what still comes was under way while the weights changed
            server.version = published.version
        finally:
            await asyncio.shield(server.remote.resume())
        await self._verify(server, published)
        self.note_progress()
        self._open(server)

    async def _verify(self, server: Server, published: Published) -> None:
        gap = await measure(server.remote, published.expected)
        if raw := explain_raw(server.remote, gap):
            raise WeightsError(raw)
        if gap.expected > self._tolerance:
            raise WeightsError(await self._explain(server, published, gap.expected))

    async def _explain(self, server: Server, published: Published, gap: float) -> str:
        problem = (
            f"sampler.urls: {server.url} was given the weights of version {published.version}, and scores a probe of "
            f"{max(map(len, published.expected.prompts))} tokens {gap:.2g} nats away from the trainer (at most "
            f"{self._tolerance:g}, sampler.tolerance)"
        )
        advice = server.remote.advice
        fresh = await measure(server.remote, published.expected, past_the_cache=True)
        if fresh.expected <= self._tolerance:
            return f"{problem}: its prefix cache is that of older weights, {advice.emptied_cache}"
        for other in self._published.values():
            older = other.version != published.version
            if older and (await measure(server.remote, other.expected)).expected <= self._tolerance:
                return f"{problem}: it still serves those of version {other.version}, {advice.loaded}"
        return (
            f"{problem}: does it compute as the trainer does (--dtype and model.dtype, the precision of the LM head, "
            "rope settings, quantisation)?"
        )

    async def _has_its_weights(self, server: Server) -> bool:
        """Probe a server; what it answered before the probe is confirmed if the probe is right."""
        answers = list(server.unconfirmed)
        published = self._published.get(-1 if server.version is None else server.version)
        if published is None:  # none yet, or so old that the trainer has forgotten them
            return False
        gap = await measure(server.remote, published.expected)
        if gap.expected > self._tolerance:
            return False
        for earlier in answers:
            earlier.confirmed = not earlier.void
        server.unconfirmed = [later for later in server.unconfirmed if later not in answers]
        return True

    async def confirm(self, servers: Collection[Server]) -> None:
        """Find out whether servers still have the weights that they were given."""
        await asyncio.gather(*map(self._confirm, servers))

    async def _confirm(self, server: Server) -> None:
        async with server.control:
            if server.lost_at is not None:
                return
            try:
                if not await self._has_its_weights(server):
                    raise UnreachableError("it no longer has the weights that it was given: it was restarted")
            except (UnreachableError, BadAnswerError) as error:
                self._lose(server, error)

    async def _drained(self, server: Server) -> None:
        while server.in_flight:
            await self._changed.wait()

    def _open(self, server: Server) -> None:
        server.is_open, server.lost_at, server.attempts = True, None, 0
        self._changed.set()

    def _void(self, server: Server) -> None:
        """Give up what is not confirmed: nobody knows which weights made it."""
        server.epoch += 1
        for unconfirmed in server.unconfirmed:
            unconfirmed.void = True
        server.unconfirmed = []
        self._on_void()

    def _lose(self, server: Server, error: Exception) -> None:
        server.trouble = str(error)
        if server.lost_at is None:
            server.lost_at = asyncio.get_running_loop().time()
            server.is_open = False
            self._begin(self._recover(server))

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
        """Open a server that answers again. It may be another process, with the weights that it was started with."""
        assert self._current is not None
        current = self._current  # newer weights may come meanwhile: who publishes them waits, and loads them next
        await server.remote.describe()
        await server.remote.resume()  # a sync that was cut short left it standing still
        try:
            has_them = await self._has_its_weights(server)
        except ForgottenError:
            has_them = False
        if not has_them:
            self._void(server)
        if not has_them or server.version != current.version:
            await server.remote.prepare()
            await self._load(server, current)
        self._open(server)

    def report(self) -> str:
        """Describe what each server is doing."""
        return "; ".join(map(str, self.servers))

    async def close(self) -> None:
        """End what is done to servers, see to it that none is left paused, and let go of them."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        await asyncio.gather(*(server.remote.close() for server in self.servers))
