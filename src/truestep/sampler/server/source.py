"""Rollouts from inference servers: the trainer's side. Only the trainer's own thread touches the policy."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from truestep import progress
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.environments.rewards import Rating
from truestep.policy.policy import Policy
from truestep.rollouts.advantages import AdvantageRule
from truestep.rollouts.selection import choose_truncated, has_advantage, put_group_aside
from truestep.rollouts.source import Interrupted, never
from truestep.sampler.completions import DecodeOptions, Request
from truestep.sampler.groups import fingerprint, num_groups, refuse_other_groups, with_advantages
from truestep.sampler.rated import Rated
from truestep.sampler.server.ahead import LookAhead, Pace
from truestep.sampler.server.answers import Answering
from truestep.sampler.server.check import check_server
from truestep.sampler.server.copies import HostWeights
from truestep.sampler.server.errors import ServerError
from truestep.sampler.server.fleet import Fleet, Published
from truestep.sampler.server.making import Group, SamplingOptions
from truestep.sampler.server.probe import Expected, expect, make_probes
from truestep.sampler.server.protocol import InferenceServer
from truestep.sampler.server.sync import Publisher
from truestep.types import PutAside, Rejected, Rollout

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


class ServerSource:
    """A source whose documents come from inference servers, which get the policy's new weights after each update."""

    plans_ahead = False
    waits_for_checkpoints = False

    def __init__(
        self,
        *,
        policy: Policy,
        prompts: Sequence[Prompt],
        make_servers: Callable[[], Sequence[InferenceServer]],
        rewards: AwaitedRewards,
        sampling: SamplingOptions,
        pace: Pace,
        publisher: Publisher,
        send_from: torch.device | None = None,  # the device through which weights are sent; None: over the disk
        advantage_rule: AdvantageRule | str,
        pause: str,
        tolerance: float,
        rolling: bool = False,  # servers get new weights one after another
        truncated: str = "keep",  # or mask
        replace_limit: int = 0,  # groups without a difference that a step replaces at most
        publishes: bool = True,  # False: whoever shares this source gives it weights to send
        loop: LoopThread | None = None,  # tests give one with a clock of its own
    ):
        self._policy, self._prompts, self._rewards = policy, prompts, rewards
        self._sampling, self._publisher, self._send_from = sampling, publisher, send_from
        self._advantage_rule, self._truncated = advantage_rule, truncated
        self._sorting: list[PutAside] = []  # the loop's thread adds to it
        self._put_aside: list[PutAside] = []  # what the last snapshot knows of, and no line of the ledger has yet
        self._loop = loop or LoopThread()
        self._publishing: Future[None] | None = None  # None: nobody has asked for documents yet
        self._publishes, self._closed = publishes, False
        self.asked_to_stop: Callable[[], bool] = never
        self.put_rejected: Callable[[Sequence[Rejected]], None] | None = None
        try:
            servers, longest = self._loop.run(self._connect(make_servers))
            self.probes = make_probes(prompts, sampling.seed, longest - 1)
            make_fleet = partial(Fleet, servers, pause=pause, tolerance=tolerance, rolling=rolling)
            self._read = partial(policy.tokenizer.decode, skip_special_tokens=True)
            self._at_once = pace.concurrency
            self._ahead = LookAhead(make_fleet, prompts, sampling, pace, rewards.rate, self._read)
            self._ahead.replace(self._sorted_out, replace_limit)
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

    def take(self, count: int, documents_seen: int) -> list[Rollout]:
        """Take exactly `count` documents, in whole groups."""
        groups_wanted = num_groups(count, self._sampling.group_size)
        if self._publishing is None and self._publishes:
            self._publish(documents_seen)
        with (
            progress.waiting_for("completions from the inference servers"),
            progress.working("sampling by the servers", "answers"),
        ):
            groups = self._wait_for(self._loop.submit(self._ahead.collect(groups_wanted, documents_seen)))
        rollouts = [rollout for group in groups for rollout in self._with_advantages(group)]
        return choose_truncated(rollouts, self._truncated)[0]

    def _with_advantages(self, group: Group) -> list[Rollout]:
        return with_advantages([member.rollout for member in group.members], group.number, self._advantage_rule)

    def _sorted_out(self, group: Group) -> bool:
        """Put a complete group aside if it has no difference. The loop's thread calls this."""
        rollouts = self._with_advantages(group)
        if any(map(has_advantage, rollouts)):
            return False
        self._sorting.extend(put_group_aside(rollouts))
        return True

    def _wait_for(self, collected: Future[_T]) -> _T:
        while True:
            try:
                return collected.result(_POLL_SECONDS)
            except TimeoutError:
                if collected.done():
                    return collected.result()
            if self.asked_to_stop() and collected.cancel():
                raise Interrupted

    def answer(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        options: DecodeOptions,
        rater: Rates,
        asked_to_stop: Callable[[], bool],
        documents_seen: int,
    ) -> list[Rated]:
        """Have the servers complete prompts with the current weights, one completion for each request."""
        if self._publishing is None and self._publishes:
            self._publish(documents_seen)
        self.wait_until_sent()

        async def work() -> list[Rated]:
            fleet, size = self._ahead.fleet, self._sampling.vocabulary_size
            return await Answering(fleet, options, size, rater, self._read, self._at_once).run(prompts, requests)

        with (
            progress.waiting_for("answers of the inference servers"),
            progress.working("sampling by the servers", "answers"),
        ):
            return self._wait_for(self._loop.submit(work()))

    def updated(self, documents_seen: int) -> None:
        if self._publishing is not None and self._publishes:
            self._publish(documents_seen)

    def _publish(self, version: int) -> None:
        self.wait_until_sent()
        weights = self._publisher.write(self._policy, version)
        self.send(weights, expect(self._policy, self.probes, version))

    def wait_until_sent(self) -> None:
        """Wait until every server has the weights that were sent last."""
        if self._publishing is not None:
            with progress.waiting_for("the inference servers to load weights"):
                self._publishing.result()

    def send(self, weights: Path | HostWeights | None, expected: Expected) -> None:
        """Send new weights to every server, beside whatever the trainer does next."""
        assert weights is not None, "only ranks that have no servers get nothing to send"
        self._publishing = self._loop.submit(self._ahead.publish(Published(weights, expected)))

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._prompts, self._sampling.seed, self._sampling.group_size)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Note which groups are open. What is put aside after that belongs to a group that is open here, and a run that
        goes on from here puts it aside again: so only what came before is given to the ledger."""

        async def note() -> tuple[dict[str, Any], list[PutAside]]:
            sorted_out, self._sorting = self._sorting, []
            return await self._ahead.state(), sorted_out

        state, sorted_out = self._loop.run(note())
        self._put_aside += sorted_out

        def made() -> dict[str, Any]:
            # None of it, unless the run stops before it has written a line.
            put_aside = [[one.id, one.reason, one.group_id] for one in self._put_aside]
            return state | {"fingerprint": self._fingerprint, "put_aside": put_aside}

        return made

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_groups(state, self.state())
        self._ahead.restore(state)
        self._put_aside = [PutAside(*one) for one in state.get("put_aside", ())]

    def drain_rejected(self) -> list[Rejected]:
        rejected = self._ahead.maker.rejected  # the loop's thread may add to it meanwhile
        return [rejected.popleft() for _ in range(len(rejected))]

    def arrived(self) -> list[Rollout]:
        """Hand over the completions to be compared with the policy, of those since the last call."""
        arrived = self._ahead.maker.arrived
        return [arrived.popleft() for _ in range(len(arrived))]

    def drain_measured(self) -> dict[str, float]:
        return {}

    def drain_put_aside(self) -> list[PutAside]:
        put_aside, self._put_aside = self._put_aside, []
        return put_aside

    def checkpointed(self, checkpoint: Path, step: int, documents_seen: int) -> None: ...

    def close(self, finished: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._publishing is not None:
                with contextlib.suppress(TimeoutError):
                    self._publishing.exception(_CLOSE_SECONDS)
        finally:
            self._loop.run(self._ahead.close())
            self._loop.close()
            self._rewards.close()
            self._publisher.close(finished)
