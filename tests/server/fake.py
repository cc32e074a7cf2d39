"""Servers in memory. The log-prob of each token says which weights made it, and its tokens which completion it is of.

Weights are directories that do not exist: their names are numbers, one for each time that a trainer wrote some.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.errors import ServerError, UnreachableError
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.generate.servers.fleet import Published, Signal
from truestep.generate.servers.probe import TEMPERATURE, Expected
from truestep.generate.servers.protocol import Description, InferenceServer
from truestep.types import Rollout

VOCABULARY, STOP, STARTED_WITH = 1000, 0, 9999
PROBES = ((3, 4, 5), (6, 7))
LATENCY, PER_TOKEN, DOWN = 0.01, 0.1, 7.0  # seconds
Fault = Exception | Callable[[], Awaitable[None]]
Came = Callable[[int, Sequence[int]], None]  # tokens of a completion


def scores(weights: int, temperature: float) -> np.ndarray:
    """Log-probs of the token behind any prompt."""
    logits = np.random.default_rng(weights).normal(size=VOCABULARY) * 3 / temperature
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def expected(weights: int, version: int) -> Expected:
    both = [np.stack([scores(weights, temperature)] * len(PROBES)) for temperature in (TEMPERATURE, 1.0)]
    return Expected(version, PROBES, *both)


def published(version: int, weights: int | None = None) -> Published:
    number = version if weights is None else weights
    return Published(Path(str(number)), expected(number, version))


@dataclass
class Clock:
    """Numbers whatever happens, over all servers."""

    now: int = 0

    def tick(self) -> int:
        self.now += 1
        return self.now


@dataclass
class Sampled:
    """A completion, as its server knows it."""

    server: str
    began: int  # of the clock
    ended: int = 0


@dataclass(eq=False)
class FakeServer(InferenceServer):
    url: str = "a"
    model: str = "policy"
    timeout: float = 60.0
    clock: Clock = field(default_factory=Clock)
    weights: int = STARTED_WITH
    seed: int = 0
    longest: int = 6  # completions have 2 tokens to so many

    def __post_init__(self) -> None:
        self.up, self.paused, self.starts, self.aborts, self.running = True, False, 0, 0, 0
        self.description = Description((self.model,), 1000, VOCABULARY)
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)  # what happens to the next calls of a name
        self.spoil: Callable[[list[Completion]], list[Completion]] = lambda choices: choices
        self.calls: list[str] = []
        self.sampled: dict[int, Sampled] = {}
        self.probes: list[tuple[int, int]] = []  # when each began, and of which weights
        self.cache: int | None = None  # weights whose computations a prompt of a probe still finds
        self.ignores_temperature = False
        self.closed = False
        self._changed = Signal()
        self._draw = random.Random(f"{self.url}{self.seed}")

    # ---- what happens to it

    def crash(self) -> None:
        """All that is under way is lost."""
        self.up, self.starts = False, self.starts + 1
        self._changed.set()

    def restart(self) -> None:
        self.up, self.paused, self.weights = True, False, STARTED_WITH
        self._changed.set()

    async def crash_and_restart(self, down: float = DOWN) -> None:
        self.crash()
        await asyncio.sleep(down)
        self.restart()

    async def hang(self) -> None:
        await asyncio.sleep(self.timeout)
        raise UnreachableError(f"gave no answer within {self.timeout:g} s")

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(LATENCY)
        if not self.up:
            raise UnreachableError(f"/{name}: refused")
        if self.faults[name]:
            fault = self.faults[name].popleft()
            if isinstance(fault, Exception):
                raise fault
            await fault()

    # ---- what it is asked

    async def describe(self) -> Description:
        await self._call("describe")
        return self.description

    async def complete(self, asked: Request, n: int) -> list[Completion]:
        await self._call("complete")
        return await self._sample(asked, n, lambda index, tokens: None)

    async def stream(self, asked: Request, n: int, came: Came) -> list[Completion]:
        await self._call("stream")
        return await self._sample(asked, n, came)

    async def _sample(self, asked: Request, n: int, came: Came) -> list[Completion]:
        starts, aborts = self.starts, self.aborts
        numbers = [self.clock.tick() for _ in range(n)]
        self.sampled |= {number: Sampled(self.url, number) for number in numbers}
        lengths = [self._draw.randint(2, self.longest) for _ in numbers]
        tokens: list[list[int]] = [[] for _ in numbers]
        logprobs: list[list[float]] = [[] for _ in numbers]
        self.running += 1
        try:
            while any(len(some) < length for some, length in zip(tokens, lengths, strict=True)):
                await asyncio.sleep(PER_TOKEN)
                while self.paused and self.aborts == aborts and self.starts == starts:
                    await self._changed.wait()
                if self.starts != starts:
                    raise UnreachableError("the connection was lost")
                if self.aborts != aborts:
                    break
                for index, number in enumerate(numbers):
                    at = len(tokens[index])
                    if at < lengths[index]:
                        ends = at + 1 == lengths[index] < asked.options.max_new_tokens
                        tokens[index].append((10 + number // 900, 10 + number % 900, 5)[min(at, 2)])
                        if ends and at >= 2:
                            tokens[index][-1] = STOP
                        elif ends:
                            lengths[index] += 1
                        logprobs[index].append(-(1 + self.weights) / 16384)
                        came(index, tokens[index][-1:])
        finally:
            self.running -= 1
            self._changed.set()
        for number in numbers:
            self.sampled[number].ended = self.clock.tick()
        choices = [
            Completion(some, values, stopped=some[-1] == STOP)
            if len(some) == length
            else Completion([], [], stopped=False, aborted=True)
            for some, values, length in zip(tokens, logprobs, lengths, strict=True)
        ]
        return self.spoil(choices)

    async def next_token(
        self, prompt: tuple[int, ...], temperature: float, count: int, *, past_the_cache: bool = False
    ) -> dict[int, float]:
        began = self.clock.tick()
        if any(token >= VOCABULARY for token in prompt):
            raise ServerError("no such token")
        await self._call("next_token")
        weights = self.weights if self.cache is None or past_the_cache else self.cache
        known = scores(weights, 1.0 if self.ignores_temperature else temperature)
        self.probes.append((began, weights))
        return {int(token): float(known[token]) for token in known.argsort()[-count:]}

    async def pause(self, mode: str) -> None:
        await self._call("pause")
        if mode == "abort":
            self.aborts += 1
        while mode == "wait" and self.running:
            await self._changed.wait()
        self.paused = True
        self._changed.set()

    async def load(self, weights: Path) -> None:
        await self._call("load")
        assert self.paused, "weights change only while it stands still"
        self.weights = int(weights.name)

    async def resume(self) -> None:
        await self._call("resume")
        self.paused = False
        self._changed.set()

    async def close(self) -> None:
        self.closed = True


class FakeRewards:
    """By turns at once and late. `fails` says of a text why it cannot be rated."""

    def __init__(self, fails: Callable[[str], str | None] = lambda text: None):
        self._fails, self.rated, self.closed = fails, 0, False
        self.seeds: list[str] = []

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[Rating]:
        self.rated += 1
        self.seeds.append(seed)
        future: Future[Rating] = Future()
        seconds, rate = self._rates(prompt, completion)

        def finish() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(rate())
            except RewardError as error:
                future.set_exception(error)

        asyncio.get_running_loop().call_later(seconds, finish)
        return future

    def _rates(self, prompt: Prompt, completion: str) -> tuple[float, Callable[[], Rating]]:
        """Return how long the reward takes, and what gives it then."""

        def rate() -> Rating:
            if reason := self._fails(completion):
                raise RewardError(reason)
            return Rating(len(completion) % 7)

        return 0.3 * (self.rated % 3), rate

    def close(self) -> None:
        self.closed = True


def asked(
    token_ids: Sequence[int] = (3, 4),
    *,
    temperature: float = 1.0,
    most: int = 6,
    stops: Sequence[int] = (STOP,),
    session: str | None = None,
) -> Request:
    return Request(tuple(token_ids), DrawOptions(temperature, most, frozenset(stops)), session=session)


def read(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def make_prompts(count: int = 10) -> list[Prompt]:
    return [Prompt(f"p{number}", f"text {number}", {}, tuple(range(3, 6 + number % 4))) for number in range(count)]


def labels(rollout: Rollout, values: Any) -> np.ndarray:
    return np.asarray(values)[rollout.loss_mask]


def weights_of(rollout: Rollout) -> list[int]:
    """The weights that made each label, as its server said in the log-prob."""
    return [round(-float(value) * 16384) - 1 for value in labels(rollout, rollout.logprobs)]


def completion_of(rollout: Rollout) -> int:
    """The number of the completion, as its server said in the tokens."""
    tokens = labels(rollout, rollout.input_ids)
    return int(tokens[0] - 10) * 900 + int(tokens[1] - 10)
