"""The engine as a service: completes requests whenever they come, from tasks, other threads and other ranks.

The trainer and the engine use the same weights and the same device, so the engine computes only while the trainer is in
`map`. There, engine steps alternate with the event loop that runs the work of `map`. So the next turn of an episode, a
reward, or any other request can begin while other completions are in flight.

With several ranks, each rank runs its own part of the work, and requests go to any team of tensor ranks that has room
(`dispatch`). In rounds, ranks exchange new requests and ended completions (`rounds`). If results must be reproducible
bit for bit, requests begin in waves (`waves`).
"""

import asyncio
import contextlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from truestep.generate.engine.dispatch import Dispatch, Key
from truestep.generate.engine.phase import EngineSettings, Phase
from truestep.generate.engine.rounds import Asked, News, Rounds
from truestep.generate.engine.team import Team
from truestep.generate.engine.waves import Waves
from truestep.generate.generator import Completion, Generate, OnTokens, Request, pass_on, run_all
from truestep.generate.parts import Part, current_part, working_on
from truestep.metrics.spent import Stopwatch
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.rollouts.source import Interrupted, never

T = TypeVar("T")
R = TypeVar("R")

_IDLE = "idle"  # the name of the time in which nothing could be computed
_POLL_SECONDS = 0.2  # seconds between checks whether the run was asked to stop
_TEAM_POLL_SECONDS = 0.01  # seconds between the times at which waiting tensor ranks look for new rounds together
_STEPS = 8  # engine steps between the times at which computing tensor ranks look for new rounds together


@dataclass
class Spent:
    """Seconds and use of one or several calls of `map`, for the step's metrics."""

    sampling: float = 0.0  # seconds until the last completion ended
    rating: float = 0.0  # seconds from then until the work was done
    idle: float = 0.0  # seconds of `sampling` in which no request could be computed: all work waited for something else
    cache_use: float = 0.0  # peak fraction of this rank's KV cache in use
    prompt_tokens: int = 0  # prompt tokens that this rank computed
    cached_tokens: int = 0  # prompt tokens found in this rank's cache

    def add(self, sampling: float, rating: float, idle: float, phase: Phase) -> None:
        self.sampling += sampling
        self.rating += rating
        self.idle += idle
        self.cache_use = max(self.cache_use, phase.cache_use)
        self.prompt_tokens += phase.prompt_tokens
        self.cached_tokens += phase.cached_tokens


@dataclass
class _Ask:
    """A request of this rank that has not ended."""

    future: asyncio.Future[Completion]
    on_tokens: OnTokens | None
    part: Part | None  # the part of the work that asked; None: another thread asked
    told: int = 0  # tokens that `on_tokens` was called with

    def tell(self, tokens: Sequence[int]) -> None:
        if self.on_tokens is not None and tokens:
            self.told += len(tokens)
            self.on_tokens(tokens)

    def end(self, completion: Completion) -> None:
        self.tell(completion.token_ids[self.told :])
        if not self.future.done():
            self.future.set_result(completion)


class EngineGenerator:
    """A `Generator` that samples in process, with the policy that is trained."""

    def __init__(self, policy: Policy, settings: EngineSettings | None = None):
        self.policy, self.settings, self.version = policy, settings or EngineSettings(), 0
        self.spent = Spent()
        self._mapping: _Mapping | None = None
        self._foreign: deque[tuple[Request, Future[Completion]]] = deque()  # requests of other threads

    def weights(self, version: int) -> None:
        """Set the version of the weights. Each `map` begins with an empty cache, so nothing computed with older weights
        is used."""
        self.version = version

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        """Complete a request of the work of `map`."""
        if self._mapping is None:
            raise RuntimeError("the engine computes while the trainer is in `map`: ask from its work, or use `ask`")
        return await self._mapping.generate(request, on_tokens)

    def ask(self, request: Request) -> Future[Completion]:
        """Ask for a completion from any thread. It is computed while the trainer is in `map`: now, or the next time."""
        future: Future[Completion] = Future()
        self._foreign.append((request, future))
        if (mapping := self._mapping) is not None:
            mapping.call(lambda: mapping.take_foreign(self._foreign))
        return future

    def map(
        self,
        items: Sequence[T],
        work: Callable[[T, Generate], Coroutine[Any, Any, R]],
        asked_to_stop: Callable[[], bool] = never,
    ) -> list[R]:
        """Run `work` for all items at once, each on one of the ranks, and return all results on every rank."""
        ranks = self.policy.weights.ranks

        async def run() -> list[R]:
            with torch.no_grad(), self.policy.weights.gathered():
                mapping = self._mapping = _Mapping(self, len(items), asked_to_stop)
                try:
                    mapping.take_foreign(self._foreign)
                    own = range(ranks.rank, len(items), ranks.size)
                    return await mapping.run(run_all([mapping.work(work, number, items[number]) for number in own]))
                finally:
                    self._mapping = None

        results: list[Any] = [None] * len(items)
        for rank, part in enumerate(ranks.gather(_run(run))):
            results[rank :: ranks.size] = part
        return results


class _Mapping:
    """One call of `map` on one rank. All of it runs in one event loop."""

    def __init__(self, owner: EngineGenerator, items: int, asked_to_stop: Callable[[], bool]):
        policy, settings = owner.policy, owner.settings
        self._owner, self._asked_to_stop = owner, asked_to_stop
        self._ranks, self._team = policy.weights.ranks, Team.of(policy)
        self._phase = Phase(policy, settings)
        teams = self._ranks.teams
        self._own_team = next(number for number, team in enumerate(teams) if self._ranks.rank in team)
        self._at_once = -(-items // len(teams))
        rows = settings.most_rows(policy)
        room = rows + rows // 8 + 1 if len(teams) > 1 and not settings.waves else sys.maxsize
        self._dispatch = Dispatch(len(teams), room)
        self._waves = Waves(self._ranks.size) if settings.waves else None
        self._open: set[Part] = set()  # the parts of this rank's work that are not done
        self._longest = 0  # tokens of the longest request of any rank so far
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._numbers = itertools.count()
        self._asks: dict[Key, _Ask] = {}  # this rank's requests
        # Requests of this phase whose tokens are streamed: the number of tokens sent so far.
        self._streams: dict[Key, int] = {}
        self._news = News()
        self._rounds = Rounds(self._ranks, self._changed)
        self._start = self._last_end = time.perf_counter()
        self._waits = Stopwatch()
        self._idle = 0.0  # seconds with nothing to compute, until the last completion ended
        self._asked_at = time.monotonic()  # time of the last check whether the run was asked to stop

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended; the next one takes the waiting requests
            self._loop.call_soon_threadsafe(function)

    def take_foreign(self, waiting: deque[tuple[Request, Future[Completion]]]) -> None:
        while waiting:
            request, future = waiting.popleft()
            task = self._loop.create_task(self.generate(request))
            task.add_done_callback(partial(pass_on, future=future))

    async def work(self, work: Callable[[T, Generate], Coroutine[Any, Any, R]], number: int, item: T) -> R:
        with working_on(Part((number,), self._open, self._changed.set)):
            return await work(item, self.generate)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        part = current_part()
        key = next(self._numbers) * self._ranks.size + self._ranks.rank
        ask = self._asks[key] = _Ask(self._loop.create_future(), on_tokens, part)
        self._news.asked.append(Asked(key, request, () if part is None else part.place, on_tokens is not None))
        self._changed.set()
        try:
            return await ask.future
        finally:
            if self._asks.pop(key, None) is not None:  # the caller was cancelled
                self._news.cancelled.append(key)
                self._changed.set()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Serve requests until the work of all ranks is done, and return the result of this rank's work."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._changed.set())
        try:
            await self._settle()
            with progress.working("sampling", "completions", len(self._news.asked) or None):
                await self._serve(task)
            return task.result()
        except BaseException as error:  # the other ranks get it
            self._rounds.say(News(error=error))
            raise
        finally:
            self._rounds.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._phase.close()
            self._note_spent()

    async def _settle(self) -> None:
        """Let other tasks run until no more requests arrive, so that these requests begin together."""
        before = -1
        while before != len(self._news.asked):
            before = len(self._news.asked)
            for _ in range(3):
                await asyncio.sleep(0)

    async def _serve(self, task: "asyncio.Task[Any]") -> None:
        """Alternate engine steps with the event loop."""
        for step in itertools.count():
            self._say(task)
            if not (self._team.size > 1 and self._phase.busy and step % _STEPS) and self._take_rounds(task):
                return
            if not self._phase.busy:
                await self._wait(task)
                continue
            ended = self._phase.step(self._at_once, self._longest)
            for key, completion in ended:
                self._end(key, completion)
            self._stream()
            await (self._settle() if ended else asyncio.sleep(0))

    def _say(self, task: "asyncio.Task[Any]") -> None:
        self._news.done = task.done()
        if task.done() and not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._news.error = error
        if self._waves is not None and self._all_wait():
            self._news.settled = self._waves.num_ended
        self._rounds.say(self._news)
        self._news = News()

    def _all_wait(self) -> bool:
        """Return whether all parts of this rank's work wait for completions."""
        waiting = {ask.part for ask in self._asks.values()}
        return all(part in waiting for part in self._open if not part.num_open)

    def _take_rounds(self, task: "asyncio.Task[Any]") -> bool:
        """Process the news of all ranks. Return True if the work of all of them is done."""
        for round_ in self._rounds.take(self._ranks.least_of_team(len(self._rounds))):
            for rank, news in enumerate(round_):
                self._take(news, rank)
            self._hand_over()
            if errors := [news.error for news in round_ if news.error is not None]:
                if task.done():
                    task.result()  # raises this rank's own error, if it has one
                raise errors[0]
            if all(news.done for news in round_):
                return True
        return False

    def _take(self, news: News, rank: int) -> None:
        for asked in news.asked:
            self._longest = max(self._longest, asked.request.most_tokens)
            if asked.streams:
                self._streams[asked.key] = 0
        if self._waves is None:
            self._dispatch.add([(asked.key, asked.request) for asked in news.asked])
        else:
            self._waves.settled(rank, news.settled)
            for asked in news.asked:
                self._waves.ask(asked.place, asked.key, asked.request)
        for key in news.cancelled:
            self._forget(key)
            self._streams.pop(key, None)
            self._phase.cancel(key)
        for key, tokens in news.tokens:
            if key in self._asks:
                self._asks[key].tell(tokens)
        for key, completion in news.ended:
            self._forget(key)
            if completion is not None and key in self._asks:
                self._asks.pop(key).end(completion)

    def _forget(self, key: Key) -> None:
        self._dispatch.ended(key)
        if self._waves is not None:
            self._waves.ended(key)
            self._changed.set()  # this rank then reports again whether its work waits

    def _hand_over(self) -> None:
        if self._waves is not None:
            self._dispatch.add(self._waves.next())
        for team, key, request in self._dispatch.hand_over():
            if team == self._own_team:
                self._phase.submit(key, request)

    def _end(self, key: Key, completion: Completion) -> None:
        """Pass on a completion: at once to this rank's own tasks, and in the next round to those of others."""
        completion = replace(completion, versions=[self._owner.version] * len(completion.token_ids))
        self._last_end = time.perf_counter()
        self._idle += self._waits.drain().get(_IDLE, 0.0)
        self._streams.pop(key, None)
        ask = self._asks.pop(key, None)
        if ask is not None:
            ask.end(completion)
        self._news.ended.append((key, completion if ask is None else None))

    def _stream(self) -> None:
        for key, sent in self._streams.items():
            tokens = self._phase.drawn(key)[sent:]
            if not tokens:
                continue
            self._streams[key] += len(tokens)
            if key in self._asks:
                self._asks[key].tell(tokens)
            else:
                self._news.tokens.append((key, list(tokens)))

    async def _wait(self, task: "asyncio.Task[Any]") -> None:
        """Wait for requests, or for other ranks, while nothing is computed."""
        seconds = _POLL_SECONDS if self._team.size == 1 else _TEAM_POLL_SECONDS
        what = progress.OTHER_RANKS if task.done() else "rewards"
        with self._waits.measure(_IDLE), progress.waiting_for(what), progress.working("rating", "rewards"):
            while not self._changed.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), seconds)
                if not task.done() and time.monotonic() - self._asked_at >= _POLL_SECONDS:
                    self._asked_at = time.monotonic()
                    if self._asked_to_stop():
                        self._news.error = Interrupted()
                        return
                if self._team.size > 1:
                    return
        self._changed.clear()

    def _note_spent(self) -> None:
        sampling, rating = self._last_end - self._start, time.perf_counter() - self._last_end
        self._owner.spent.add(sampling, rating, self._idle, self._phase)


def _run(main: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """Run a coroutine to its end. If this thread already runs an event loop, as in a notebook, use another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(main())).result()
