"""Prompts with seeds, and ways to complete them by the engine or in static batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from truestep.environments.rater import Rates
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import Completion, DrawOptions, Generate, Request
from truestep.generate.group_maker import GroupOptions
from truestep.generate.in_process import InProcessSource
from truestep.generate.play import SingleTurn
from truestep.generate.read import reader
from truestep.model.policy import Policy


@dataclass(frozen=True)
class How:
    """How completions are drawn, and with which settings of the engine."""

    temperature: float
    top_p: float
    max_new_tokens: int
    batch_size: int | None
    stop_ids: frozenset[int]
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    engine: bool = True
    exact: bool = False

    @property
    def draw(self) -> DrawOptions:
        return DrawOptions(
            self.temperature, self.max_new_tokens, self.stop_ids, self.top_p, self.top_k, self.min_p, self.stop
        )

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings(rows=self.batch_size, engine=self.engine, exact=self.exact)


@dataclass(frozen=True)
class Asked:
    input_ids: tuple[int, ...]
    seed: tuple[int, ...]

    def request(self, how: How) -> Request:
        return Request(self.input_ids, how.draw, self.seed)


def decode(
    policy: Policy,
    asked: Sequence[Asked],
    how: How,
    on_done: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """Complete all requests at once. Every rank gets all completions."""

    async def work(item: tuple[int, Asked], generate: Generate) -> Completion:
        completion = await generate(item[1].request(how))
        if on_done is not None:
            on_done(item[0], completion)
        return completion

    return EngineGenerator(policy, how.settings).map(list(enumerate(asked)), work)


def decode_plainly(policy: Policy, asked: Sequence[Asked], how: How) -> list[Completion]:
    return decode(policy, asked, replace(how, engine=False))


def in_process_source(
    policy: Policy,
    how: How,
    *,
    group_size: int,
    seed: int,
    rater: Rates,
    stop_at_rejected: bool = False,
    **others: Any,
) -> InProcessSource:
    return InProcessSource(
        plays=SingleTurn(rater, reader(policy)),
        generator=EngineGenerator(policy, how.settings),
        options=GroupOptions(group_size, seed, how.draw, stop_at_rejected),
        **others,
    )
