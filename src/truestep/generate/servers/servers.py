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
from truestep.environments.rater import Rates
from truestep.environments.rewards import Rating
from truestep.generate.completions import DecodeOptions, Request
from truestep.generate.rewarded import Rated
from truestep.generate.servers.check import check_server
from truestep.generate.servers.errors import ServerError
from truestep.generate.servers.evaluation import ServerEvaluation
from truestep.generate.servers.fleet import Fleet, Published
from truestep.generate.servers.group_maker import Group, SamplingOptions
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.look_ahead import LookAhead, StalenessLimit
from truestep.generate.servers.probe import Expected, make_probes
from truestep.generate.servers.protocol import InferenceServer
from truestep.generate.servers.weight_files import Publisher
from truestep.process import progress
from truestep.rollouts.source import Interrupted
from truestep.types import Rollout

_T = TypeVar("_T")
_POLL_SECONDS = 0.5  # between questions whether the run was asked to stop
_CLOSE_SECONDS = 30.0  # for a publication in flight: it must not leave a server paused


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.submit(work).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class AwaitedRewards:
    """Rewards as coroutines, for the event loop."""

    def __init__(self, rater: Rates, seed: int = 0):
        self._rater, self._seed = rater, seed

    async def rate(self, prompt: Prompt, text: str, name: str) -> Rating:
        return await asyncio.wrap_future(self._rater.submit(prompt, text, f"{self._seed} {name}"))

    def close(self) -> None:
        self._rater.close()


class Servers:
    """The inference servers: sampling of groups, evaluation, and publication of weights.

    Only the first rank talks to them. Its main thread calls these methods.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        make_servers: Callable[[], Sequence[InferenceServer]],
        rewards: AwaitedRewards,
        sampling: SamplingOptions,
        limit: StalenessLimit,
        read: Callable[[Sequence[int]], str],  # decodes a completion's tokens to text
        publisher: Publisher,
        send_from: torch.device | None = None,  # device from which weights are sent by NCCL; None: over the disk
        pause: str,
        tolerance: float,
        rolling: bool = False,  # servers get new weights one after another
        loop: LoopThread | None = None,  # None: a new one; tests pass one with a clock of its own
    ):
        self._prompts, self._rewards, self._sampling, self._read = prompts, rewards, sampling, read
        self._publisher, self._send_from = publisher, send_from
        self._at_once = limit.concurrency
        self._loop = loop or LoopThread()
        self._sending: Future[None] | None = None  # None: no weights were sent yet
        self._closed = False
        try:
            servers, longest = self._loop.run(self._connect(make_servers))
            self.probes = make_probes(prompts, sampling.seed, longest - 1)
            make_fleet = partial(Fleet, servers, pause=pause, tolerance=tolerance, rolling=rolling)
            self.ahead = LookAhead(make_fleet, prompts, sampling, limit, rewards.rate, read)
        except BaseException:
            self._loop.close()
            raise

    async def _connect(
        self, make_servers: Callable[[], Sequence[InferenceServer]]
    ) -> tuple[Sequence[InferenceServer], int]:
        """Make and check the servers. Return them, and the longest context that all of them accept."""
        needed = max(len(prompt.input_ids) for prompt in self._prompts) + self._sampling.max_new_tokens
        servers, size = make_servers(), self._sampling.vocabulary_size
        try:
            lengths = []
            for server in servers:
                with progress.waiting_for(f"{server.url} to answer"):
                    lengths.append(await check_server(server, self._prompts, size, needed, self._link))
        except BaseException:
            await asyncio.gather(*(server.close() for server in servers))
            raise
        return servers, min(lengths)

    async def _link(self, server: InferenceServer) -> None:
        if self._send_from is not None and (reason := await server.link(self._send_from)) is not None:
            raise ServerError(
                f"sampler.transfer: nccl: {server.url} does not take weights so: {reason}. Start it with "
                '--weight-transfer-config \'{"backend": "nccl"}\''
            )

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a short coroutine in the event loop, and return its result."""
        return self._loop.run(work)

    def collect(self, groups: int, documents_seen: int, asked_to_stop: Callable[[], bool]) -> list[Group]:
        """Wait for so many complete groups. Raise `Interrupted` if the run is asked to stop."""
        with (
            progress.waiting_for("completions from the inference servers"),
            progress.working("sampling by the servers", "answers"),
        ):
            return self._wait_for(self._loop.submit(self.ahead.collect(groups, documents_seen)), asked_to_stop)

    def answer(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        options: DecodeOptions,
        rater: Rates,
        asked_to_stop: Callable[[], bool],
    ) -> list[Rated]:
        """Sample and rate one completion for each request with the current weights, for an evaluation."""
        self.wait_until_sent()

        async def work() -> list[Rated]:
            fleet, size = self.ahead.fleet, self._sampling.vocabulary_size
            return await ServerEvaluation(fleet, options, size, rater, self._read, self._at_once).run(prompts, requests)

        with (
            progress.waiting_for("answers of the inference servers"),
            progress.working("sampling by the servers", "answers"),
        ):
            return self._wait_for(self._loop.submit(work()), asked_to_stop)

    def _wait_for(self, collected: Future[_T], asked_to_stop: Callable[[], bool]) -> _T:
        while True:
            try:
                return collected.result(_POLL_SECONDS)
            except TimeoutError:
                if collected.done():
                    return collected.result()
            if asked_to_stop() and collected.cancel():
                raise Interrupted

    def arrived(self) -> list[Rollout]:
        """Return the completions to compare with the policy that arrived since the last call."""
        arrived = self.ahead.maker.arrived
        return [arrived.popleft() for _ in range(len(arrived))]

    def wait_until_sent(self) -> None:
        """Wait until every server has the weights that were sent last."""
        if self._sending is not None:
            with progress.waiting_for("the inference servers to load weights"):
                self._sending.result()

    def send(self, weights: Path | HostWeights | None, expected: Expected) -> None:
        """Start the publication of new weights to every server, and return without waiting for it."""
        assert weights is not None, "only ranks that have no servers get nothing to send"
        self._sending = self._loop.submit(self.ahead.publish(Published(weights, expected)))

    def close(self, finished: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._sending is not None:
                with contextlib.suppress(TimeoutError):
                    self._sending.exception(_CLOSE_SECONDS)
        finally:
            self._loop.run(self.ahead.close())
            self._loop.close()
            self._rewards.close()
            self._publisher.close(finished)
