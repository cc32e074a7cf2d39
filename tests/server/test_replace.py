"""Groups without a difference are replaced by others, and never for how long they took. On a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from server.fake import FakeRewards, FakeServer
from server.sources import GROUP, STEP, Run
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating
from truestep.rollouts.advantages import AdvantageError


class Rewards(FakeRewards):
    """Prompts by number: those that are `equal` rate every completion alike, and those that are `slow` take long."""

    def __init__(self, equal: set[int], slow: set[int] = frozenset()):  # type: ignore[assignment]
        super().__init__()
        self.equal, self.slow, self.drawn = equal, slow, 0

    def _rates(self, prompt: Prompt, completion: str) -> tuple[float, Callable[[], Rating]]:
        number = int(prompt.id.removeprefix("p"))
        self.drawn += 1
        rating = Rating(1.0 if number in self.equal else float(self.drawn))
        return 50.0 if number in self.slow else 0.1 * number, lambda: rating


def prompt_number(document: Any) -> int:
    return int(document.metadata["prompt_id"].removeprefix("p"))


def put_aside(run: Run) -> list[int]:
    """The groups, each once."""
    return sorted({int(str(document.group_id)) for document in [*run.put_aside(), *run.source.aside().put_aside]})


@pytest.mark.parametrize("max_staleness", [0, STEP, 3 * STEP])
@pytest.mark.parametrize("slow", [set(), {2}, {2, 5, 7}], ids=["none slow", "one slow", "three slow"])
def test_every_group_is_trained_on_or_has_no_difference(max_staleness: int, slow: set[int]) -> None:
    """However slow it is: each that was started and is not open any more is in a step, or was put aside for equal
    rewards."""
    equal = {1, 4, 7}
    run = Run([FakeServer()], max_staleness=max_staleness, rewards=Rewards(equal, slow), replace_limit=100).run(12)
    trained = {int(str(document.group_id)) for step in run.steps for document in step}
    assert all(prompt_number(document) not in equal for step in run.steps for document in step)
    aside, state = put_aside(run), run.source.state()
    assert trained | set(aside) | set(state["open"]) == set(range(state["groups"])), "no group is lost"
    assert not trained & set(aside) and aside
    for step in run.steps:
        assert len(step) == STEP
    run.close()


def test_a_slow_group_is_in_the_very_step_that_asked_for_it() -> None:
    """Synchronous: ten others could have been made while it was, and none takes its place."""
    alike = {1, 3, 5}
    fast = Run([FakeServer()], rewards=Rewards(alike), replace_limit=100).run(4)
    slow = Run([FakeServer()], rewards=Rewards(alike, {0, 2}), replace_limit=100).run(4)
    assert slow.group_numbers == fast.group_numbers
    assert put_aside(slow) == put_aside(fast)
    for run in (fast, slow):
        run.close()


def test_at_most_so_many_are_replaced_in_a_step() -> None:
    run = Run([FakeServer()], rewards=Rewards(set(range(10))), replace_limit=3).run(3)
    assert len(put_aside(run)) == 9
    assert run.group_numbers and all(len(numbers) == STEP // GROUP for numbers in run.group_numbers)
    run.close()


def test_without_the_option_nothing_is_put_aside() -> None:
    run = Run([FakeServer()], rewards=Rewards(set(range(10)))).run(3)
    assert put_aside(run) == [] and run.group_numbers == [[0, 1], [2, 3], [4, 5]]
    run.close()


@pytest.mark.parametrize("waiting", [False, True], ids=["after a step", "in a wait"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_that_goes_on_lists_each_group_once(steps: int, waiting: bool) -> None:
    """It stops after a step, or while it waits for the next, with groups in the making: what was put aside is in the
    ledger before or after, never in both and never in neither."""
    equal, rewards = {1, 4, 7}, {"max_staleness": 3 * STEP, "replace_limit": 100}
    first = Run([FakeServer()], rewards=Rewards(equal), **rewards).run(steps)  # type: ignore[arg-type]
    ledger = [str(document.id) for document in first.put_aside()]
    first.thread.advance(5.0)  # more groups are put aside meanwhile
    state = (first.source.snapshot() if waiting else first.snapshot)()
    first.close(finished=False)
    second = Run([FakeServer()], rewards=Rewards(equal), weights=first.weights, **rewards)  # type: ignore[arg-type]
    second.source.restore(state)
    second.seen = first.seen
    second.run(4)
    after = second.snapshot()
    ledger += [str(document.id) for document in second.put_aside()]
    assert len(set(ledger)) == len(ledger)
    trained = {int(str(document.group_id)) for run in (first, second) for step in run.steps for document in step}
    aside = {int(name.partition("-")[0]) for name in ledger}
    assert aside and trained | aside | set(after["open"]) == set(range(after["groups"])) and not trained & aside
    second.close()


def test_advantages_of_the_user_that_fail_end_the_run_in_words() -> None:
    run = Run([FakeServer()], replace_limit=3)

    def fails(group: Any) -> bool:
        raise AdvantageError("data.advantages 'a:b': group 0: KeyError")

    run.ahead._is_to_replace = fails
    with pytest.raises(AdvantageError, match="group 0: KeyError"):
        run.step()
    run.close(finished=False)
