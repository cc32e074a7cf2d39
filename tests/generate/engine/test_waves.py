"""Where a run is deterministic, what is computed together does not depend on when rewards and tools answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from completing import Asked
from generate.engine.test_engine import options, requests
from ranks.cases import on_ranks
from truestep.generate.engine import service
from truestep.generate.engine.phase import EngineSettings, Phase
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import Completion, Generate, run_all
from truestep.generate.parts import part_of_work
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join

Model = Callable[[str], Path]
HOW = options(max_new_tokens=12, stop_ids=frozenset(range(0, 64, 7)))
ITEMS = 7


class Traced(Phase):
    """Notes what is computed together: each request with the step before which it came."""

    traces: ClassVar[list[list[Any]]] = []

    def __init__(self, policy: Policy, settings: EngineSettings):
        super().__init__(policy, settings)
        self.steps, self.trace = 0, []
        self.traces.append(self.trace)

    def submit(self, number: int, request: Any) -> None:
        self.trace.append((self.steps, request.seed))
        super().submit(number, request)

    def step(self, *arguments: int) -> list[tuple[int, Completion]]:
        self.steps += 1
        return super().step(*arguments)


def talk(policy: Policy, waves: bool, pauses: int) -> tuple[list[list[Completion]], list[Any]]:
    """Hold conversations of up to three turns, two of each item at once, with pauses drawn from this seed."""
    prompts = requests(tuple(5 + 3 * number for number in range(ITEMS)))
    pause = random.Random(pauses * 100 + policy.weights.ranks.rank)

    async def converse(number: int, twin: int, generate: Generate) -> list[Completion]:
        ids, drawn = prompts[number].input_ids, []
        with part_of_work():
            for turn in range(1 + (number + twin) % 3):
                await asyncio.sleep(pause.random() * 0.02)
                drawn.append(await generate(Asked(ids, (number, turn, twin)).request(HOW)))
                ids = (*ids, *drawn[-1].token_ids, 9)
            await asyncio.sleep(pause.random() * 0.02)
        return drawn

    async def work(number: int, generate: Generate) -> list[Completion]:
        both = await run_all([converse(number, twin, generate) for twin in range(2)])
        return [completion for each in both for completion in each]

    generator = EngineGenerator(policy, EngineSettings(rows=8, longest=100, waves=waves))
    drawn = generator.map(range(ITEMS), work)
    return drawn, Traced.traces.pop()


def test_it_does_not_depend_on_pauses(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "Phase", Traced)
    policy = load_policy(tiny_model("qwen3_tied"))
    first, second = (talk(policy, waves=True, pauses=seed) for seed in range(2))
    assert first == second, "the tokens, their log-probs bit for bit, and what was computed together"
    assert len({step for step, _ in first[1]}) == 3, "one wave for each turn"
    overlapping = [talk(policy, waves=False, pauses=seed)[1] for seed in range(2)]
    assert overlapping[0] != overlapping[1], "without waves it does"


def converse(model: Path) -> None:
    service.Phase = Traced  # type: ignore[misc]
    policy = load_policy(model, ranks=join(RankLayout(data_shard=2), device="cpu", stall_timeout=60))
    first, second = (talk(policy, waves=True, pauses=seed) for seed in range(2))
    assert first == second
    assert first[1], "each rank has its part"


def test_nor_over_ranks(tiny_model: Model) -> None:
    on_ranks(2, converse, tiny_model("qwen3_tied"))


def test_a_cancelled_request_does_not_hold_the_next_wave_up(tiny_model: Model) -> None:
    """Neither one in flight nor one that waits for its wave."""
    asked = requests((5, 9))[0]

    async def work(number: int, generate: Generate) -> Completion:
        if number == 0:
            await asyncio.sleep(0.02)
        for seconds in (0.001, 0.02):
            task = asyncio.ensure_future(generate(asked.request(options(max_new_tokens=400))))
            await asyncio.sleep(seconds)
            task.cancel()
        return await generate(asked.request(HOW))

    policy = load_policy(tiny_model("qwen3_tied"))
    drawn = EngineGenerator(policy, EngineSettings(longest=500, waves=True)).map(range(2), work)
    assert drawn[0].token_ids == drawn[1].token_ids
