"""Plans of many ranks: each rank searches and digests a part, and what ranks see differently is found all the same."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from truestep.ranks.axes import RankError, RankLayout
from truestep.ranks.group import Ranks
from truestep.rollouts.digests import digests_of
from truestep.step.plan import agreement, trees
from truestep.step.plan.agreement import digests_by_all, digests_of_plan, disagreement, documents_of_rank, other_of
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.plan.trees import Spread, find_items, parts_of_groups
from truestep.types import Rollout, StepPlan

RANKS = 6


def documents(groups: int = 20, members: int = 5) -> list[Rollout]:
    draw = np.random.default_rng(0)
    made = []
    for group in range(groups):
        prompt = draw.integers(1, 50, 30)
        for member in range(members):
            ids = np.concatenate([prompt, draw.integers(1, 50, draw.integers(4, 20))])
            mask = np.arange(len(ids)) >= 30
            advantages = np.where(mask, np.float32(draw.normal()), np.float32(0))
            made.append(Rollout(f"{group}-{member}", ids, mask, None, advantages, group_id=str(group)))
    return made


def rule(share: Any = "off") -> StepRule:
    return StepRule(100, False, 1, 1, 400, RANKS, share=share, even_length=100.0)


class Gathers:
    """Ranks as threads, each of which waits for the values of all."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(RANKS), [None] * RANKS

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(30)
        gathered = list(self.values)
        self.barrier.wait(30)
        return gathered


def of_ranks(work: Callable[[Spread], Any]) -> list[Any]:
    """Return what each rank's call returned or raised."""
    gathers, found = Gathers(), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            found[rank] = work(Spread(rank, lambda value: gathers.gather(rank, value)))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(RANKS)]


def plans_of_ranks(share: Any) -> list[StepPlan]:
    return of_ranks(lambda spread: plan_exactly(documents(), rule(share), 0, spread))


def test_ranks_that_each_search_a_part_make_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    honest = trees.identities
    monkeypatch.setattr(trees, "identities", lambda these, alike: searched.append(len(these)) or honest(these, alike))
    monkeypatch.setattr(trees, "_SPREAD", 1)
    plans = plans_of_ranks("always")
    assert sum(searched) == 100 and max(searched) <= 20
    assert len({plan.micro_batches for plan in plans}) == 1
    assert disagreement([digests_of_plan(plan, rank) for rank, plan in enumerate(plans)]) is None


def test_a_search_in_parts_finds_the_items_of_the_whole() -> None:
    everything = documents()
    whole = find_items(everything, (), 1, [400, 60], 100.0)
    parts = [part for part in parts_of_groups(everything, RANKS) if len(part)]
    assert [index for part in parts for index in part] == list(range(100))
    assert all(part.start % 5 == 0 for part in parts), "no group is in two parts"
    for number in range(2):
        found = [
            find_items(everything[p.start : p.stop], (), 1, [400, 60], 100.0)[number].moved(p.start) for p in parts
        ]
        joined = trees.Packables.joined(found)
        for name in ("members", "tokens"):
            assert sorted(getattr(joined, name)) == sorted(getattr(whole[number], name))


SYSTEM = 400  # tokens of a prompt that all groups have


def shared_prompt() -> list[Rollout]:
    made = []
    for one in documents():
        ids = np.concatenate([np.arange(1, SYSTEM + 1), one.input_ids])
        mask = np.concatenate([np.zeros(SYSTEM, bool), one.loss_mask])
        assert one.advantages is not None
        advantages = np.concatenate([np.zeros(SYSTEM, np.float32), one.advantages])
        made.append(dataclasses.replace(one, input_ids=ids, loss_mask=mask, advantages=advantages))
    return made


def test_a_prefix_of_groups_in_two_parts_is_computed_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_SPREAD", 1)
    everything, limits = shared_prompt(), [100_000]
    (whole,) = find_items(everything, (), 1, limits, 1e9)
    joined, *others = of_ranks(
        lambda spread: trees.find_items_together(everything, (), 1, limits, 1e9, spread, RANKS)[0]
    )
    assert all(other == joined for other in others)
    assert sorted(index for members in joined.members for index in members) == list(range(100))
    assert len(whole.members) == 1 and len(joined.members) == RANKS
    again = (RANKS - 1) * SYSTEM
    assert sum(joined.tokens) == sum(whole.tokens) + again
    assert joined.cost == pytest.approx(whole.cost + again, rel=1e-3)


@pytest.mark.parametrize("field", ["id", "loss_mask", "number"])
def test_a_rank_that_searches_other_data_is_told_apart(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_SPREAD", 1)

    def plan(spread: Spread) -> StepPlan:
        made = documents()
        if spread.rank == 2:
            made = made[:-1] if field == "number" else [changed_in(made[0], field), *made[1:]]
        return plan_exactly(made, rule("always"), 0, spread)

    for rank, error in enumerate(of_ranks(plan)):
        assert isinstance(error, RankError)
        others = "data ranks 0, 1, 3, 4, 5" if rank == 2 else "data rank 2"
        assert str(error).startswith(f"{others} and data rank {rank} plan different steps: they do not see the same")


@pytest.mark.parametrize("few", [True, False])
def test_a_rank_that_does_not_search_is_told_apart(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees so few documents that it searches them alone, or none, and compares its plan already."""
    monkeypatch.setattr(trees, "_SPREAD", 100)

    def plan(spread: Spread) -> None:
        if spread.rank == 2:
            made = plan_exactly(documents()[:99], rule("always"), 0, spread) if few else None
            found = disagreement(spread.gather(None if made is None else digests_of_plan(made, 2)))
            raise RankError(str(found))
        plan_exactly(documents(), rule("always"), 0, spread)

    errors = of_ranks(plan)
    assert all(isinstance(error, RankError) for error in errors)
    assert str(errors[2]) == "ranks 2 planned another step than the rest"
    assert str(errors[4]).startswith("data rank 2 and data rank 4 plan different steps")


def test_small_steps_are_searched_by_each_rank() -> None:
    def no_gather(value: Any) -> list[Any]:
        raise AssertionError("nothing is exchanged")

    spread = plan_exactly(documents(), rule("always"), 0, Spread(0, no_gather))
    assert spread.micro_batches == plan_exactly(documents(), rule("always"), 0).micro_batches


def changed(plan: StepPlan, index: int) -> StepPlan:
    """The plan as a rank sees it whose function of advantages gives another number to one document."""
    one = plan.documents[index]
    assert one.advantages is not None
    other = dataclasses.replace(one, advantages=one.advantages * 2)
    return dataclasses.replace(plan, documents=(*plan.documents[:index], other, *plan.documents[index + 1 :]))


@pytest.mark.parametrize("large", [False, True])
def test_a_rank_that_computes_another_advantage_is_found(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(agreement, "_MOST_NUMBERS", 0)
    plan = plan_exactly(documents(), rule(), 0)
    for wrong in range(RANKS):
        index = documents_of_rank(plan, wrong)[0]
        told = [digests_of_plan(changed(plan, index) if rank == wrong else plan, rank) for rank in range(RANKS)]
        # Two ranks digested it; in a small step all did, so that it is known which is wrong.
        (watching,) = [rank for rank in range(RANKS) if wrong == other_of(plan, rank)]
        first, second = sorted((wrong, watching))
        assert disagreement(told) == (
            f"ranks {first} and {second} have different advantages for the documents of data rank {wrong}"
            if large
            else f"ranks {wrong} planned another step than the rest"
        )
    assert disagreement([digests_of_plan(plan, rank) for rank in range(RANKS)]) is None


def changed_in(one: Rollout, field: str) -> Rollout:
    mask = one.loss_mask.copy()
    mask[-1] = False
    return dataclasses.replace(one, **{field: {"id": "another", "loss_mask": mask}[field]})


@pytest.mark.parametrize("field", ["id", "loss_mask"])
def test_every_rank_compares_what_decides_the_plan(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MOST_NUMBERS", 0)
    plan = plan_exactly(documents(), rule(), 0)
    other = changed_in(plan.documents[7], field)
    wrong = dataclasses.replace(plan, documents=(*plan.documents[:7], other, *plan.documents[8:]))
    told = [digests_of_plan(wrong if rank == 2 else plan, rank) for rank in range(RANKS)]
    differs = "ranks 2 planned another step than the rest"
    assert disagreement(told) == differs
    assert disagreement([*told[:2], None, *told[3:]]) == differs, "its data has ended"
    assert disagreement(told[1:3]) == "ranks 0 and 1 planned different steps", "it is not known which is wrong"


def test_a_large_step_is_digested_once_and_by_one_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MOST_NUMBERS", 0)
    plan = plan_exactly(documents(), rule(), 0)
    assert [sorted(digests_of_plan(plan, rank)) for rank in (0, 5)] == [[-1, 0, 1], [-1, 0, 5]]
    later = [dataclasses.replace(plan, documents_seen=100 * step) for step in range(RANKS - 1)]
    assert {other_of(each, 2) for each in later} == {0, 1, 3, 4, 5}, "in turn with every other rank"


def test_the_ledgers_digests_are_made_by_all_ranks_in_turn() -> None:
    made, gathers = documents(), Gathers()
    found = dict[int, list[str]]()

    class Rank(Ranks):
        def gather_parts(self, value: Any, ahead: bool = False) -> list[Any]:
            assert len(value) <= -(-100 // RANKS)
            return gathers.gather(self.rank, value)

    def digest(rank: int) -> None:
        found[rank] = digests_by_all(made, False, Rank(rank, RankLayout(data_shard=RANKS)))

    threads = [threading.Thread(target=digest, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[rank] == digests_of(made, False) for rank in range(RANKS))
