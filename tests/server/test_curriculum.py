"""Prompts that rest, drawn ahead of the trainer: by the groups of earlier steps alone, however late rewards come."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from drawing import Draw
from server.fake import FakeRewards, FakeServer
from server.sources import GROUP, STEP, FakeWeights, Run
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.order import OrderOptions
from truestep.generate.pools import Curriculum

PER_STEP = STEP // GROUP
SIZES = {"math": 7, "code": 4}
WEIGHTS = {"math": 2.0, "code": 1.0}
PROMPTS = [
    Prompt(f"{name}:{at}", "text", {}, tuple(range(3, 6 + at % 4)), name) for name in SIZES for at in range(SIZES[name])
]
ORDER = OrderOptions(WEIGHTS, Curriculum(1.0, 0.0, 2))


def group_rewards(number: int) -> tuple[float, float]:
    return random.Random(number).choice([(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.5)])


class Rewards(FakeRewards):
    """By the numbers of the group and of its episode, after a while that depends on `seed`."""

    def __init__(self, seed: int):
        super().__init__()
        self._random = random.Random(seed)

    def _rates(self, prompt: Prompt, completion: str) -> tuple[float, Callable[[], Rating]]:
        _, _, group, episode = map(int, self.seeds[-1].split())
        return self._random.choice([0.0, 0.5, 20.0]), lambda: Rating(group_rewards(group)[episode])


def expected(steps: int, ahead: int, replace_limit: int) -> list[list[str]]:
    """The prompts that each step trains on."""
    draw, taken, end = Draw(SIZES, 0, WEIGHTS, rest=2, lag=ahead * PER_STEP), [], 0
    for _ in range(steps):
        start, kept, replaced = end, list[int](), 0
        while len(kept) < PER_STEP:
            while len(draw.drawn) <= end:
                draw.next()
            if len(set(group_rewards(end))) == 1 and replaced < replace_limit:
                replaced += 1
            else:
                kept.append(end)
            end += 1
        draw.step({number: sum(group_rewards(number)) / GROUP for number in range(start, end)}, end)
        taken.append([f"{source}:{at}" for source, at, _ in (draw.drawn[number] for number in kept)])
    return taken


def trained(run: Run) -> list[list[str]]:
    return [[document.metadata["prompt_id"] for document in step[::GROUP]] for step in run.steps]


def served(seed: int, **options: object) -> Run:
    return Run([FakeServer()], rewards=Rewards(seed), prompts=PROMPTS, order=ORDER, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("replace_limit", [0, 3])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_what_is_drawn_does_not_depend_on_when_rewards_come(ahead: int, replace_limit: int) -> None:
    for seed in range(2):
        run = served(seed, max_staleness=ahead * STEP, replace_limit=replace_limit, busy=random.Random(seed).random())
        run.run(14)
        assert trained(run) == expected(14, ahead, replace_limit)
        run.close()


def test_rests_change_what_is_drawn_and_are_measured() -> None:
    run = served(0, max_staleness=STEP).run(8)
    assert {"easy_prompts", "hopeless_prompts/math", "source_groups/code"} <= set(run.measured)
    assert 0 < run.measured["hopeless_prompts"] < 1
    run.close()
    rests = [prompt for step in expected(20, 1, 0) for prompt in step]
    plain = Draw(SIZES, 0, WEIGHTS)
    assert rests != [f"{source}:{at}" for source, at in (plain.next() for _ in rests)]
    assert set(rests) == {prompt.id for prompt in PROMPTS}, "none is lost"
    assert expected(20, 0, 0) != expected(20, 1, 0) != expected(20, 3, 0), "groups ahead know of fewer steps"


@pytest.mark.parametrize("replace_limit", [0, 3])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_goes_on_with_the_same_prompts(ahead: int, replace_limit: int) -> None:
    server, weights, taken, state, seen = FakeServer(), FakeWeights(), list[list[str]](), None, 0
    for part in range(4):
        server.up = True
        run = Run(
            [server],
            max_staleness=ahead * STEP,
            replace_limit=replace_limit,
            rewards=Rewards(part),
            prompts=PROMPTS,
            order=ORDER,
            weights=weights,
        )
        if state is not None:
            run.source.restore(state)
        run.seen = seen
        run.run(4)
        state, seen = json.loads(json.dumps(run.snapshot())), run.seen
        taken += trained(run)
        run.close(finished=False)
    assert taken == expected(16, ahead, replace_limit)


def _raise() -> Rating:
    raise RewardError("no reward")


def test_groups_that_are_given_up_leave_their_prompts_as_they_were() -> None:
    """Each fifth group cannot be rated: its prompt neither rests nor is lost, and comes again in the next pass."""

    class Failing(Rewards):
        def _rates(self, prompt: Prompt, completion: str) -> tuple[float, Callable[[], Rating]]:
            seconds, rate = super()._rates(prompt, completion)
            return seconds, _raise if int(self.seeds[-1].split()[2]) % 5 == 0 else rate

    run = Run([FakeServer()], rewards=Failing(0), prompts=PROMPTS, order=ORDER, max_staleness=STEP).run(30)
    numbers = [number for step in run.group_numbers for number in step]
    assert numbers == [number for number in range(numbers[-1] + 1) if number % 5]
    assert {prompt for step in trained(run) for prompt in step} == {prompt.id for prompt in PROMPTS}
    run.close()
