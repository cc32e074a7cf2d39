"""The fleet of servers: load balancing, publication of weights, and recovery of lost servers.

An answer is used only once a later probe has shown that its server still has the weights that it was sent (`confirm`).
A server that was restarted in the meantime serves its initial weights without saying so.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from truestep.generate.errors import (
    BadAnswerError,
    ForgottenError,
    ServerError,
    UnreachableError,
    VoidedError,
    WeightsError,
)
from truestep.generate.generator import Completion, OnTokens, Request
from truestep.generate.servers import check_answer as answer
from truestep.generate.servers.batches import Batches
from truestep.generate.servers.check import explain_raw
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.probe import Expected, measure
from truestep.generate.servers.protocol import InferenceServer
from truestep.generate.sticky import StickyPlaces
from truestep.process import progress

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds between attempts to reach a lost server
_PATIENCE = 3  # attempts to reach a lost server after which its unconfirmed answers are void
_REMEMBERED = 4  # newest versions whose probe scores are kept
_CLOSE_SECONDS = 10.0  # seconds at the end of the run for paused servers to resume


@dataclass(frozen=True)
class Published:
    """New weights, and the trainer's scores of the probes with them."""

    weights: Path | HostWeights  # a directory, or tensors to send
    expected: Expected
    fence: Callable[[], None] = lambda: None  # raises if another process trains the run meanwhile

    @property
    def version(self) -> int:
        return self.expected.version


@dataclass(eq=False)
class Server:
    """The state of one server."""

    remote: InferenceServer
    version: int | None = None  # version of the weights that it loaded last
    is_open: bool = False  # takes requests
    epoch: int = 0  # increases when the version of the completions in flight becomes unknown
    in_flight: int = 0  # completions
    served: int = 0  # completions
    unconfirmed: list["ServedCompletions"] = field(default_factory=list)
    lost_at: float | None = None  # on the loop's clock; None: it is not lost
    trouble: str = ""  # the last error
    attempts: int = 0  # attempts to recover it
    control: asyncio.Lock = field(default_factory=asyncio.Lock)  # one publication, probe or recovery at a time

    @property
    def url(self) -> str:
        return self.remote.url

    def __str__(self) -> str:
        if self.lost_at is not None:
            seconds = asyncio.get_running_loop().time() - self.lost_at
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
            return f"{self.url} is lost since {since} ({seconds:.0f} s, {self.attempts} attempts): {self.trouble}"
        trouble = f"; its last trouble: {self.trouble}" if self.trouble else ""
        state = "open" if self.is_open else "loading weights"
        return f"{self.url} is {state} with {self.in_flight} completions in flight{trouble}"


@dataclass(eq=False)
class ServedCompletions:
    """The completions of one request. A later probe either confirms them or makes them void; this is final."""

    server: Server
    choices: list[Completion]
    confirmed: bool = False  # a probe has shown that their versions are right
    void: bool = False  # it is unknown which weights sampled them


class Signal:
    """An event that wakes the tasks that are waiting for it now. It does not stay set for tasks that wait later."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def set(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class Fleet:
    """All servers: sends them requests and weights, and recovers lost ones."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        *,
        vocabulary_size: int,
        pause: str,
        tolerance: float,
        rolling: bool = False,
        on_void: Callable[[], None],
        on_fatal: Callable[[Exception], None],
    ):
        self.servers = [Server(remote) for remote in servers]
        self.version: int | None = None  # version that every reachable server has
        self.last_progress = -math.inf  # on the loop's clock: the last completion or load; aborts do not count
        self._vocabulary_size, self._pause, self._tolerance, self._rolling = vocabulary_size, pause, tolerance, rolling
        self._on_void, self._on_fatal = on_void, on_fatal
        self._published: dict[int, Published] = {}
        self._current: Published | None = None
        self._changed = Signal()
        self._batches = Batches(self._choices)
        self._sessions = StickyPlaces[Server]()
        self._tasks: set[asyncio.Task[None]] = set()  # publications and recoveries in flight, one server each

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Complete a request. Equal requests that are made at once are sent as one."""
        return await self._batches.generate(request, on_tokens)

    async def _choices(self, request: Request, n: int, on_tokens: OnTokens | None) -> list[Completion]:
        served = await self.ask(request, n, on_tokens)
        return [replace(choice, server=served.server.url, answer=served) for choice in served.choices]

    async def ask(self, request: Request, n: int, on_tokens: OnTokens | None = None) -> ServedCompletions:
        """Send a request for `n` completions to the server with the fewest in flight, or to the server that served the
        earlier turns of its conversation."""
        if request.options.truncates or request.options.stop:
            raise ServerError(
                "inference servers sample with a temperature only, without top_p, top_k, min_p and stop texts"
            )
        server = await self._pick(request.session)
        version, epoch, size = server.version, server.epoch, self._vocabulary_size
        assert version is not None, "a server is opened with its first weights"
        server.in_flight += n
        server.served += n
        try:
            # If streams do not return experts, the completion is not streamed, and its tokens come all at once.
            at_once = server.remote.routes is not None and not server.remote.streams_routes
            if self._pause == "keep" or (on_tokens is not None and not at_once):
                choices = await answer.stream(server.remote, request, n, size, lambda: server.version or 0, on_tokens)
            else:
                choices = await answer.complete(server.remote, request, n, size, version)
                if on_tokens is not None and choices[0].token_ids:
                    on_tokens(choices[0].token_ids)
        except UnreachableError as error:
            self._lose(server, error)
            raise
        finally:
            server.in_flight -= n
            self._changed.set()
        if server.epoch != epoch:
            raise VoidedError
        if not all(choice.aborted for choice in choices):
            self.note_progress()
        server.unconfirmed.append(ServedCompletions(server, choices))
        return server.unconfirmed[-1]

    def note_progress(self) -> None:
        self.last_progress = asyncio.get_running_loop().time()
        progress.made("answers")

    async def _pick(self, session: str | None) -> Server:
        """Wait for an open server. Return the one that has served the conversation, or the one with the fewest
        completions in flight, then with the fewest served."""
        while not (ready := [server for server in self.servers if server.is_open]):
            await self._changed.wait()
        found = self._sessions.of(session)
        if found is None or found not in ready:
            found = min(ready, key=lambda server: (server.in_flight, server.served))
        self._sessions.remember(session, found)
        return found

    async def publish(self, published: Published) -> None:
        """Publish new weights to every server that is not lost."""
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
                return  # its recovery loads the current weights
            try:
                await server.remote.prepare()  # the server goes on sampling
                server.is_open = False
                if self._pause == "wait":
                    await self._drained(server)
                # After the new weights are loaded, a restart since the last probe could no longer be detected.
                if server.version is not None and not await self._has_its_weights(server):
                    self._void(server)
                await self._load(server, published)
            except (UnreachableError, BadAnswerError) as error:
                self._lose(server, error)

    async def _load(self, server: Server, published: Published) -> None:
        published.fence()
        try:
            await server.remote.pause(self._pause)
            if isinstance(published.weights, HostWeights):
                await server.remote.send(published.weights)
            else:
                await server.remote.load(published.weights)
            if self._pause != "keep":
                server.epoch += 1  # completions that still arrive were in flight while the weights changed
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
            return f"{problem}: its prefix cache is still of older weights, {advice.emptied_cache}"
        for other in self._published.values():
            older = other.version != published.version
            if older and (await measure(server.remote, other.expected)).expected <= self._tolerance:
                return f"{problem}: it still serves the weights of version {other.version}, {advice.loaded}"
        return (
            f"{problem}: does it compute as the trainer does (--dtype and model.dtype, the precision of the LM head, "
            "rope settings, quantisation)?"
        )

    async def _has_its_weights(self, server: Server) -> bool:
        """Probe a server, and tell whether it has its version's weights. If so, its earlier answers are confirmed."""
        answers = list(server.unconfirmed)
        published = self._published.get(-1 if server.version is None else server.version)
        if published is None:  # no weights yet, or a version older than the remembered ones
            return False
        gap = await measure(server.remote, published.expected)
        if gap.expected > self._tolerance:
            return False
        for earlier in answers:
            earlier.confirmed = not earlier.void
        server.unconfirmed = [later for later in server.unconfirmed if later not in answers]
        return True

    async def confirm(self, servers: Collection[Server]) -> None:
        """Probe servers: confirm their answers, or treat a server as lost if it no longer has its weights."""
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
        """Make a server's unconfirmed answers void: it is unknown which weights sampled them."""
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
            except Exception as error:  # a bug must end the run, not this task alone
                self._on_fatal(error)
                return
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _bring_back(self, server: Server) -> None:
        """Open a server that answers again. If it was restarted, it has its initial weights, so it loads the current
        ones."""
        assert self._current is not None
        current = self._current  # if newer weights are published meanwhile, `_update` waits for the lock and loads them
        await server.remote.describe()
        await server.remote.resume()  # an interrupted publication has left it paused
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
        """Describe the state of each server, for messages."""
        return "; ".join(map(str, self.servers))

    async def close(self) -> None:
        """Cancel requests, publications and recoveries, which resume paused servers, and close the connections."""
        await self._batches.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        await asyncio.gather(*(server.remote.close() for server in self.servers))
