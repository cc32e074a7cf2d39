"""A run's inference servers, and the event loop in which the trainer talks to them."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from truestep.environments.prompts import Prompt
from truestep.generate.errors import ServerError
from truestep.generate.generator import Completion, Generate, Request
from truestep.generate.group_maker import Group, GroupOptions
from truestep.generate.play import Plays
from truestep.generate.servers.check import check_server
from truestep.generate.servers.confirmed import confirmed_results
from truestep.generate.servers.fleet import Fleet, Published
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.look_ahead import LookAhead, StalenessLimit
from truestep.generate.servers.probe import Expected, make_probes
from truestep.generate.servers.protocol import InferenceServer
from truestep.generate.servers.started import StartedServers
from truestep.generate.servers.weight_files import Publisher
from truestep.process import progress
from truestep.rollouts.source import Interrupted
from truestep.types import Rollout, RouteShape

T = TypeVar("T")
R = TypeVar("R")
_POLL_SECONDS = 0.5  # seconds between checks whether the run was asked to stop
_CLOSE_SECONDS = 30.0  # seconds for a publication in flight, which must not leave a server paused


async def _complete(request: Request, generate: Generate) -> Completion:
    return await generate(request)


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Servers:
    """The inference servers: sampling of groups, evaluation, and publication of weights.

    Only the first rank talks to them. Its main thread calls these methods.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        make_servers: Callable[[], Sequence[InferenceServer]],
        plays: Plays,
        sampling: GroupOptions,
        vocabulary_size: int,
        limit: StalenessLimit,
        publisher: Publisher,
        send_from: torch.device | None = None,  # device from which weights are sent by NCCL; None: over the disk
        pause: str,
        tolerance: float,
        rolling: bool = False,  # servers get new weights one after another
        # The shape of the experts that completions come with; None: experts are not requested.
        routes: RouteShape | None = None,
        started: StartedServers | None = None,  # the servers that end with the run
        loop: LoopThread | None = None,  # None: a new one; tests pass one with a clock of its own
    ):
        self._prompts, self._plays, self._sampling = prompts, plays, sampling
        self._vocabulary_size = vocabulary_size
        self._publisher, self._send_from = publisher, send_from
        self._pause, self._routes, self._started = pause, routes, started
        self._at_once = limit.concurrency
        self._loop = loop or LoopThread()
        self._sending: Future[None] | None = None  # None: no weights were sent yet
        self._closed = False
        try:
            servers, longest = self._loop.run(self._connect(make_servers))
            self.probes = make_probes(prompts, sampling.seed, longest - 1)
            make_fleet = partial(
                Fleet,
                servers,
                vocabulary_size=vocabulary_size,
                pause=pause,
                tolerance=tolerance,
                rolling=rolling,
            )
            self.ahead = LookAhead(make_fleet, prompts, sampling, limit, plays)
        except BaseException:
            self._loop.close()
            raise

    async def _connect(
        self, make_servers: Callable[[], Sequence[InferenceServer]]
    ) -> tuple[Sequence[InferenceServer], int]:
        """Make and check the servers. Return them, and the longest context that all of them accept."""
        needed = max(len(prompt.input_ids) for prompt in self._prompts) + self._sampling.draw.max_new_tokens
        servers, size = make_servers(), self._vocabulary_size
        try:
            lengths = []
            for server in servers:
                server.routes = self._routes
                with progress.waiting_for(f"{server.url} to answer"):
                    lengths.append(await check_server(server, self._prompts, size, needed, self._link, self._pause))
        except BaseException:
            await asyncio.gather(*(server.close() for server in servers))
            raise
        return servers, min(lengths)

    async def _link(self, server: InferenceServer) -> None:
        if self._send_from is not None and (reason := await server.link(self._send_from)) is not None:
            raise ServerError(
                f"sampler.transfer: nccl: {server.url} cannot receive weights by NCCL: {reason}. Start it with "
                '--weight-transfer-config \'{"backend": "nccl"}\''
            )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a short coroutine in the event loop, and return its result."""
        return self._loop.run(work)

    def collect(
        self, groups: int, documents_seen: int, asked_to_stop: Callable[[], bool]
    ) -> tuple[list[Group], list[Group]]:
        """Wait for `groups` groups. Return them, and those that were replaced. Raise `Interrupted` if the run is asked
        to stop."""
        with (
            progress.waiting_for("completions from the inference servers"),
            progress.working("sampling by the servers", "answers"),
        ):
            return self._wait_for(self._loop.submit(self.ahead.collect(groups, documents_seen)), asked_to_stop)

    def map(
        self,
        items: Sequence[T],
        work: Callable[[T, Generate], Coroutine[Any, Any, R]],
        asked_to_stop: Callable[[], bool],
    ) -> list[R]:
        """Run `work` for all items with the current weights, and return its results. Work whose completions a later
        probe does not confirm is done again."""
        self.wait_until_sent()
        places = asyncio.Semaphore(self._at_once)
        with (
            progress.waiting_for("answers of the inference servers"),
            progress.working("sampling by the servers", "answers"),
        ):
            whole = confirmed_results(self.ahead.fleet, items, work, places)
            return self._wait_for(self._loop.submit(whole), asked_to_stop)

    def ask(self, request: Request) -> Future[Completion]:
        """Ask for a completion, from any thread. A later probe confirms the weights that sampled it."""

        async def confirmed() -> Completion:
            places = asyncio.Semaphore(1)
            (completion,) = await confirmed_results(self.ahead.fleet, [request], _complete, places)
            return completion

        return self._loop.submit(confirmed())

    def _wait_for(self, collected: Future[T], asked_to_stop: Callable[[], bool]) -> T:
        while True:
            try:
                return collected.result(_POLL_SECONDS)
            except TimeoutError:
                if collected.done():
                    return collected.result()
            if asked_to_stop() and collected.cancel():
                raise Interrupted
            if self.ahead.server_error is not None and collected.cancel():  # the awaited result may never come
                raise self.ahead.server_error

    def arrived(self) -> list[Rollout]:
        """Return the completions that arrived since the last call, to be compared with the policy."""
        arrived = self.ahead.maker.arrived
        return [arrived.popleft() for _ in range(len(arrived))]

    def wait_until_sent(self) -> None:
        """Wait until every server has the weights that were sent last."""
        if self._sending is not None:
            with progress.waiting_for("the inference servers to load weights"):
                self._sending.result()

    def send(self, weights: Path | HostWeights | None, expected: Expected, fence: Callable[[], None]) -> None:
        """Start the publication of new weights to every server, and return without waiting for it. `fence` raises if
        another process trains the run meanwhile."""
        assert weights is not None, "the rank that has the servers has weights to send"
        self._sending = self._loop.submit(self.ahead.publish(Published(weights, expected, fence)))

    def close(self, finished: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._sending is not None:
                with contextlib.suppress(TimeoutError):
                    self._sending.exception(_CLOSE_SECONDS)
        finally:
            try:
                self._loop.run(self.ahead.close())
                self._loop.close()
            finally:
                if self._started is not None:
                    self._started.close()
            self._plays.close()
            self._publisher.close(finished)
