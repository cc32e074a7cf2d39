"""The order of prompts against a plain simulation: mixtures, rests, groups ahead, restarts."""

from __future__ import annotations

import json
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from drawing import Draw
from truestep.environments.prompts import Prompt
from truestep.generate.order import OrderOptions, PromptOrder, fingerprint
from truestep.generate.pools import Curriculum


def prompts_of(sizes: dict[str, int]) -> list[Prompt]:
    return [Prompt(f"{name}:{at}", "p", {}, (1,), name) for name, size in sizes.items() for at in range(size)]


def group_of(*rewards: float) -> Any:
    return [SimpleNamespace(reward=reward) for reward in rewards]


class Case:
    """Random sources, weights, bounds and rewards; the rewards depend on the numbers of groups alone."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        choose = self.random
        names = ["", "math", "code", "c"][: choose.randint(1, 3)] if choose.random() < 0.5 else ["a", "b"]
        self.sizes = {name: choose.randint(1, 12) for name in names}
        self.weights = {name: choose.choice([0.1, 1, 2.5, 3]) for name in names} if choose.random() < 0.6 else {}
        self.rest = choose.choice([None, 1, 2, 5])
        self.easy, self.hopeless = choose.choice([(1.0, 0.0), (0.7, 0.3)])
        self.per_step, self.lag_steps = choose.randint(1, 5), choose.choice([0, 0, 1, 3])
        self.seed = choose.choice([0, 7, 2**40])
        self.rewards = [
            choose.choice([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.25, 0.0), (0.5, 1.0)]) for _ in range(400)
        ]
        self.replaced = [choose.choice([0, 0, 0, 2]) for _ in range(20)]  # groups of each step beside those it keeps

    @property
    def lag(self) -> int:
        return self.lag_steps * self.per_step

    def order(self) -> PromptOrder:
        curriculum = None if self.rest is None else Curriculum(self.easy, self.hopeless, self.rest)
        return PromptOrder(prompts_of(self.sizes), self.seed, OrderOptions(self.weights, curriculum), self.lag)

    def expected(self) -> list[str]:
        weights, easy, hopeless = self.weights or None, self.easy, self.hopeless
        draw = Draw(self.sizes, self.seed, weights, easy, hopeless, self.rest, self.lag)
        end = 0
        for replaced in self.replaced:
            start, end = end, end + self.per_step + replaced
            while len(draw.drawn) < end:
                draw.next()
            draw.step({number: sum(self.rewards[number]) / 2 for number in range(start, end)}, end)
        return [f"{source}:{at}" for source, at, _ in draw.drawn]

    def played(self, *, ahead: float, restarts: float = 0.0) -> tuple[list[str], PromptOrder]:
        """Draw groups, some of them as early as they may be, and go on from a checkpoint now and then."""
        order, end, got = self.order(), 0, dict[int, str]()
        open_groups: set[int] = set()

        def draw() -> None:
            number, prompt = order.next()
            assert number not in open_groups and got.setdefault(number, prompt.id) == prompt.id
            open_groups.add(number)

        for replaced in self.replaced:
            start, end = end, end + self.per_step + replaced
            known = self.random.randint(0, replaced)  # so many are known to be replaced so far
            while len(open_groups) < end - start:
                draw()
            while order.may_begin(start + self.per_step + known) and self.random.random() < ahead:
                draw()
            order.told({number: group_of(*self.rewards[number]) for number in range(start, end)}, end)
            open_groups -= set(range(start, end))
            if self.random.random() < restarts:
                state = json.loads(json.dumps(order.snapshot(open_groups)()))
                order, open_groups = self.order(), set()
                order.restore(state)
        return [got[number] for number in range(end)], order


@pytest.mark.parametrize("seed", range(60))
def test_groups_get_what_a_plain_simulation_says_however_early_they_are_begun(seed: int) -> None:
    expected = Case(seed).expected()
    assert Case(seed).played(ahead=0.0)[0] == expected
    assert Case(seed).played(ahead=0.9)[0] == expected
    assert Case(seed).played(ahead=0.9, restarts=0.5)[0] == expected
    assert Case(seed).played(ahead=0.0, restarts=1.0)[0] == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_state_is_the_same_with_and_without_restarts(seed: int) -> None:
    whole, parts = (Case(seed).played(ahead=0.0, restarts=restarts)[1].snapshot()() for restarts in (0.0, 1.0))
    assert whole == parts


@pytest.mark.parametrize("seed", range(20))
def test_each_source_has_its_share_of_any_first_groups_within_one(seed: int) -> None:
    choose = random.Random(seed)
    weights = {"a": choose.uniform(0.1, 9), "b": choose.uniform(0.1, 9)}
    sizes = {"a": 3, "b": 50}
    order = PromptOrder(prompts_of(sizes), seed, OrderOptions(weights, Curriculum(1.0, 0.0, 2)))
    counts, names = Counter[str](), []
    for number in range(200):
        _, prompt = order.next()
        names.append(prompt.id)
        order.told({number: group_of(choose.choice([0.0, 1.0, 0.5]))}, number + 1)
        counts[prompt.source] += 1
        share = weights["a"] / sum(weights.values())
        assert abs(counts["a"] - share * (number + 1)) < 1
    assert {name.partition(":")[0] for name in names} == {"a", "b"}


def test_without_weights_sources_have_groups_by_their_numbers_of_prompts() -> None:
    order = PromptOrder(prompts_of({"a": 2, "b": 6}), 0, OrderOptions())
    drawn = [order.next()[1].id for _ in range(16)]
    assert Counter(drawn) == dict.fromkeys(drawn, 2) and len(set(drawn)) == 8


def test_half_of_the_prompts_are_hopeless() -> None:
    """They are drawn in one pass of five: 40 groups of 160, and 80 without rests."""
    order = PromptOrder(prompts_of({"": 40}), 0, OrderOptions({}, Curriculum(1.0, 0.0, 4)))
    plain = PromptOrder(prompts_of({"": 40}), 0, OrderOptions())
    drawn, unrested = Counter[bool](), Counter[bool]()
    for number in range(160):
        _, prompt = order.next()
        hopeless = int(prompt.id.rpartition(":")[2]) < 20
        drawn[hopeless] += 1
        unrested[int(plain.next()[1].id.rpartition(":")[2]) < 20] += 1
        order.told({number: group_of(0.0) if hopeless else group_of(0.0, 1.0)}, number + 1)
        if number == 39:
            assert order.measured == {"easy_prompts": 0.0, "hopeless_prompts": 0.5}
    # Pass 0 draws all 40; passes 1 to 4 the 20 others; pass 5 all 40.
    assert drawn == {True: 40, False: 120}
    assert unrested == {True: 80, False: 80}


def test_a_prompt_that_rested_is_tried_again_and_may_stay() -> None:
    order = PromptOrder(prompts_of({"": 2}), 0, OrderOptions({}, Curriculum(1.0, 0.0, 1)))
    passes: list[set[str]] = []
    rewards = {":0": iter([0.0, 0.5, 0.5, 1.0, 0.5]), ":1": iter([0.5] * 20)}
    number = 0
    for size in (2, 1, 2, 2, 2, 1, 2):
        passes.append(set())
        for _ in range(size):
            _, prompt = order.next()
            passes[-1].add(prompt.id)
            order.told({number: group_of(next(rewards[prompt.id]))}, number + 1)
            number += 1
    both, one = {":0", ":1"}, {":1"}
    assert passes == [both, one, both, both, both, one, both]


def test_where_all_prompts_rest_those_that_are_back_first_are_next() -> None:
    """At once, however long the rest is."""
    order = PromptOrder(prompts_of({"": 3}), 0, OrderOptions({}, Curriculum(1.0, 0.0, 10**9)))
    drawn = []
    for number in range(12):
        drawn.append(order.next()[1].id)
        order.told({number: group_of(0.0)}, number + 1)
    assert all(set(drawn[start : start + 3]) == {":0", ":1", ":2"} for start in range(0, 12, 3))
    state = order.snapshot()()["order"]["sources"][""]
    assert state["pass"] == 3 * (10**9 + 1)


def test_metrics_of_sources() -> None:
    order = PromptOrder(prompts_of({"a": 2, "b": 4}), 0, OrderOptions({"a": 1, "b": 1}, Curriculum(0.9, 0.1, 3)))
    rewards = {"a": (1.0, 0.9), "b": (0.0, 0.1)}
    first = dict(order.next() for _ in range(4))
    order.told({number: group_of(*rewards[prompt.source]) for number, prompt in first.items()}, 4)
    assert order.measured == {
        "easy_prompts": pytest.approx(2 / 6),
        "easy_prompts/a": 1.0,
        "easy_prompts/b": 0.0,
        "hopeless_prompts": pytest.approx(2 / 6),
        "hopeless_prompts/a": 0.0,
        "hopeless_prompts/b": 0.5,
        "source_groups/a": 2.0,
        "source_passes/a": 1.0,
        "source_reward/a": pytest.approx(0.95),
        "source_groups/b": 2.0,
        "source_passes/b": 1.0,
        "source_reward/b": pytest.approx(0.05),
    }
    order.told({}, 5)
    assert "source_reward/a" not in order.measured and order.measured["source_groups/a"] == 0


def test_a_checkpoint_of_a_version_without_sources_is_gone_on_from() -> None:
    old = {"groups": 13, "open": [9, 12], "fingerprint": "f"}
    order = PromptOrder(prompts_of({"": 5}), 3, OrderOptions())
    order.restore(old)
    draw = Draw({"": 5}, 3)
    expected = [draw.next()[1] for _ in range(16)]
    assert [(number, prompt.id) for number, prompt in (order.next() for _ in range(5))] == [
        (number, f":{expected[number]}") for number in (9, 12, 13, 14, 15)
    ]


def test_a_curriculum_may_begin_and_end_with_a_restart() -> None:
    plain = PromptOrder(prompts_of({"": 4}), 0, OrderOptions())
    for number in range(4):
        plain.next()
        plain.told({number: group_of(0.0)}, number + 1)
    rests = PromptOrder(prompts_of({"": 4}), 0, OrderOptions({}, Curriculum(1.0, 0.0, 2)))
    rests.restore(plain.snapshot()())
    for number in range(4, 7):
        rests.next()
        rests.told({number: group_of(0.0)}, number + 1)
    assert rests.measured["hopeless_prompts"] == 0.75
    again = PromptOrder(prompts_of({"": 4}), 0, OrderOptions())
    again.restore(rests.snapshot()())
    draw = Draw({"": 4})
    expected = [draw.next()[1] for _ in range(12)]
    assert [again.next()[1].id for _ in range(5)] == [f":{at}" for at in expected[7:]]


def test_other_sources_or_weights_have_another_fingerprint() -> None:
    prompts = prompts_of({"a": 2, "b": 2})
    found = {
        fingerprint(prompts, 0, 4, OrderOptions()),
        fingerprint(prompts, 0, 4, OrderOptions({"a": 1, "b": 2})),
        fingerprint(prompts, 0, 4, OrderOptions({"a": 2, "b": 2})),
        fingerprint([Prompt(each.id, each.prompt, {}, (1,), "a") for each in prompts], 0, 4, OrderOptions()),
        fingerprint([Prompt(each.id, each.prompt, {}, (1,)) for each in prompts], 0, 4, OrderOptions()),
    }
    assert len(found) == 5
    rests = OrderOptions({}, Curriculum(1.0, 0.0, 2))
    assert fingerprint(prompts, 0, 4, rests) in found, "bounds and rests may change"
