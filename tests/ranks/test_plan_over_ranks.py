"""A step's plan as data: exact documents whatever the split, equal micro-batches a rank, near equal cost."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_documents
from truestep.rollouts.parts import next_parts
from truestep.rollouts.source import FileSource
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.plan.queue import PlanQueue
from truestep.types import StepPlan


def rule(documents: int, ranks: int, *, keep: bool = False, breadth: int = 1, budget: int = 24) -> StepRule:
    return StepRule(documents, keep, 1, breadth, budget, ranks, even_length=30.0)


def all_plans(lengths: list[int], given_rule: StepRule) -> list[StepPlan]:
    queue = PlanQueue(FileSource(make_documents(lengths)), given_rule)
    plans = []
    while (plan := queue.next_plan()) is not None:
        plans.append(plan)
    return plans


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(24, 90),
)
def test_carry_is_exact_for_any_split(lengths: list[int], wanted: int, ranks: int, breadth: int, budget: int) -> None:
    plans = all_plans(lengths, rule(wanted, ranks, breadth=breadth, budget=budget))
    ids = [[document.id for document in plan.documents] for plan in plans]
    everything = [f"d{index}" for index in range(len(lengths))]
    # The set of each step depends on neither ranks nor budgets.
    assert ids == [everything[start : start + wanted] for start in range(0, len(lengths), wanted)]
    for plan in plans:
        assert len(plan.micro_batches) % (ranks * breadth) == 0
        assert all(sum(plan.documents[i].num_tokens for i in members) <= budget for members in plan.micro_batches)
        assert {len(plan.of_rank(rank)) for rank in range(ranks)} == {len(plan.micro_batches) // ranks}
        packed = sorted(i for rank in range(ranks) for members in plan.of_rank(rank) for i in members)
        assert packed == list(range(len(plan.documents)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 24), min_size=1, max_size=60), st.integers(1, 30), st.integers(1, 5), st.integers(1, 3))
def test_keep_reaches_the_target_by_whole_rounds(lengths: list[int], wanted: int, ranks: int, breadth: int) -> None:
    plans = all_plans(lengths, rule(wanted, ranks, keep=True, breadth=breadth))
    assert [d.id for plan in plans for d in plan.documents] == [f"d{index}" for index in range(len(lengths))]
    for plan in plans[:-1]:
        assert len(plan.documents) >= wanted
        # Without its last round it had not got there.
        before = sum(len(members) for members in plan.micro_batches[: -ranks * breadth])
        assert before < wanted
        assert all(plan.micro_batches)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=16, max_size=60), st.sampled_from([2, 4, 8]))
def test_ranks_cost_alike(lengths: list[int], ranks: int) -> None:
    """Side by side, micro-batches differ by less than the dearest document."""
    given_rule = dataclasses.replace(rule(len(lengths), ranks, budget=sum(lengths)), even_length=300.0)
    plan = plan_exactly(make_documents(lengths), given_rule, 0)

    costs_alone = [length * (1 + length / given_rule.even_length) for length in lengths]

    def cost(members: tuple[int, ...]) -> float:
        return sum(costs_alone[index] for index in members)

    dearest = max(costs_alone)
    for number in range(len(plan.micro_batches) // ranks):
        costs = [cost(members) for members in plan.at_once(number)]
        assert max(costs) - min(costs) <= dearest


def test_long_documents_weigh_more_than_their_tokens_say() -> None:
    documents = make_documents([512, *([32] * 32)])
    by_tokens = StepRule(33, False, 1, 1, 2048, 2)
    by_cost = dataclasses.replace(by_tokens, even_length=256.0)

    def beside(given_rule: StepRule) -> int:
        """Short documents in the micro-batch of the long one."""
        plan = plan_exactly(documents, given_rule, 0)
        return next(len(members) - 1 for members in plan.micro_batches if 0 in members)

    # 512 tokens are half of 1,024 and a third of all; but their attention is worth another 1,024.
    assert beside(by_tokens) == 8
    assert beside(by_cost) == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.lists(st.integers(0, 15), max_size=12))
def test_the_order_of_parts_depends_on_the_parts_alone(sizes: list[int], requests: list[int]) -> None:
    whole = next_parts([0] * len(sizes), sizes, sum(sizes))
    assert [whole.count(part) for part in range(len(sizes))] == sizes
    taken, got = [0] * len(sizes), []
    for count in requests:
        order = next_parts(taken, sizes, count)
        got += order
        for part in order:
            taken[part] += 1
    assert got == whole[: len(got)]


def test_the_first_of_every_part_then_the_second() -> None:
    assert next_parts([0, 0, 0], [2, 0, 3], 5) == [0, 2, 0, 2, 2]
