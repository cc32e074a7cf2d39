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
from truestep.generate.servers.evaluation import Answering
from truestep.generate.servers.fleet import Fleet, Published
from truestep.generate.servers.group_maker import Group, SamplingOptions
from truestep.generate.servers.host_copies import HostWeights
from truestep.generate.servers.look_ahead import LookAhead, Pace
from truestep.generate.servers.probe import Expected, make_probes
from truestep.generate.servers.protocol import InferenceServer
from truestep.generate.servers.weight_files import Publisher
from truestep.process import progress
from truestep.rollouts.source import Interrupted
from truestep.types import Rollout

_T = TypeVar("_T")
_POLL_SECONDS = 0.5  # between questions whether the run was asked to stop
_CLOSE_SECONDS = 30.0  # for a sync under way: a server that is left standing still serves nobody


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
    """The reward service, for the event loop to wait for."""

    def __init__(self, rater: Rates, seed: int = 0):
        self._rater, self._seed = rater, seed

    async def rate(self, prompt: Prompt, text: str, name: str) -> Rating:
        return await asyncio.wrap_future(self._rater.submit(prompt, text, f"{self._seed} {name}"))

    def close(self) -> None:
        self._rater.close()


class Servers:
    """The inference servers: groups are collected from them, answers asked of them, and new weights sent to them.

    One process talks to them, that of the first rank. Its trainer's own thread calls these methods.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        make_servers: Callable[[], Sequence[InferenceServer]],
        rewards: AwaitedRewards,
        sampling: SamplingOptions,
        pace: Pace,
        read: Callable[[Sequence[int]], str],  # the text of a completion's tokens
        publisher: Publisher,
        send_from: torch.device | None = None,  # the device through which weights are sent; None: over the disk
        pause: str,
        tolerance: float,
        rolling: bool = False,  # servers get new weights one after another
        loop: LoopThread | None = None,  # tests give one with a clock of its own
    ):
        self._prompts, self._rewards, self._sampling, self._read = prompts, rewards, sampling, read
        self._publisher, self._send_from = publisher, send_from
        self._at_once = pace.concurrency
        self._loop = loop or LoopThread()
        self._sending: Future[None] | None = None  # None: no weights were sent yet
        self._closed = False
        try:
            servers, longest = self._loop.run(self._connect(make_servers))
            self.probes = make_probes(prompts, sampling.seed, longest - 1)
            make_fleet = partial(Fleet, servers, pause=pause, tolerance=tolerance, rolling=rolling)
            self.ahead = LookAhead(make_fleet, prompts, sampling, pace, rewards.rate, read)
        except BaseException:
            self._loop.close()
            raise

    async def _connect(
        self, make_servers: Callable[[], Sequence[InferenceServer]]
    ) -> tuple[Sequence[InferenceServer], int]:
        """Find servers that serve this model, and the longest text that all of them take."""
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
        """Do a short piece of work in the event loop."""
        return self._loop.run(work)

    def collect(self, groups: int, documents_seen: int, asked_to_stop: Callable[[], bool]) -> list[Group]:
        """Wait for so many complete groups of completions."""
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
        """Have the servers complete prompts with the current weights, one completion for each request."""
        self.wait_until_sent()

        async def work() -> list[Rated]:
            fleet, size = self.ahead.fleet, self._sampling.vocabulary_size
            return await Answering(fleet, options, size, rater, self._read, self._at_once).run(prompts, requests)

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
        """Hand over the completions to be compared with the policy, of those since the last call."""
        arrived = self.ahead.maker.arrived
        return [arrived.popleft() for _ in range(len(arrived))]

    def wait_until_sent(self) -> None:
        """Wait until every server has the weights that were sent last."""
        if self._sending is not None:
            with progress.waiting_for("the inference servers to load weights"):
                self._sending.result()

    def send(self, weights: Path | HostWeights | None, expected: Expected) -> None:
        """Send new weights to every server, beside whatever the trainer does next."""
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
