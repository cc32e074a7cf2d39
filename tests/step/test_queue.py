"""From a source to plans: each document exactly as often as asked, whatever the budget, the rule and the restarts."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_document, make_documents, same_document
from truestep.rollouts.documents import document_line, read_document
from truestep.rollouts.source import FileSource, SourceError, Taken
from truestep.step.plan.plan import StepRule
from truestep.step.plan.queue import PlanQueue
from truestep.types import Rollout, StepPlan

LIMIT = 500  # plans; a queue that never ends fails instead of hanging


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    rule: StepRule
    epochs: int = 1
    shuffle_seed: int | None = None
    updates: int = 1
    drop: bool = False

    def source(self) -> FileSource:
        return FileSource(make_documents(self.lengths), epochs=self.epochs, shuffle_seed=self.shuffle_seed)

    def queue(self) -> PlanQueue:
        return PlanQueue(self.source(), self.rule, updates_per_batch=self.updates, drop_last=self.drop)

    def order(self) -> list[Rollout]:
        return list(self.source().take(10**6, 0).documents)


ANY_TARGET = st.integers(0, 9)


@st.composite
def cases(draw: st.DrawFn, *, target: st.SearchStrategy[int] = ANY_TARGET, keep: bool | None = None) -> Case:
    rule = StepRule(
        docs_per_step=draw(target),
        keep_overshoot=draw(st.booleans()) if keep is None else keep,
        depth_first_micro_batches=draw(st.integers(1, 3)),
        breadth_first_micro_batches=draw(st.integers(1, 3)),
        tokens_per_microbatch=draw(st.integers(8, 40)),
    )
    return Case(
        lengths=tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=20))),
        rule=rule,
        epochs=draw(st.integers(1, 3)),
        shuffle_seed=draw(st.none() | st.integers(0, 3)),
        updates=draw(st.integers(1, 3)),
        drop=draw(st.booleans()),
    )


def drain(queue: PlanQueue) -> list[StepPlan]:
    plans = []
    while (plan := queue.next_plan()) is not None:
        plans.append(plan)
        assert len(plans) < LIMIT
    return plans


def names(documents: Sequence[Rollout]) -> list[str]:
    return [document.id for document in documents]


def same_plans(left: Sequence[StepPlan], right: Sequence[StepPlan]) -> bool:
    if [(plan.micro_batches, plan.totals, plan.documents_seen) for plan in left] != [
        (plan.micro_batches, plan.totals, plan.documents_seen) for plan in right
    ]:
        return False
    return all(
        same_document(one, other)
        for first, second in zip(left, right, strict=True)
        for one, other in zip(first.documents, second.documents, strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(cases(target=st.integers(1, 9), keep=False))
def test_carry_trains_exactly_the_next_documents(case: Case) -> None:
    target, order = case.rule.docs_per_step, names(case.order())
    whole, rest = divmod(len(order), target)
    queue = case.queue()
    plans = drain(queue)
    expected = [order[start : start + target] for start in range(0, whole * target, target)]
    if rest and not case.drop:
        expected.append(order[-rest:])
    assert [names(plan.documents) for plan in plans] == [step for step in expected for _ in range(case.updates)]
    assert names(queue.dropped) == (order[-rest:] if rest and case.drop else [])
    for plan in plans:
        assert len(plan.micro_batches) % case.rule.breadth_first_micro_batches == 0


def packed_by_hand(lengths: list[int], rule: StepRule) -> tuple[list[list[list[int]]], bool]:
    """All steps as micro-batches of positions, one document at a time; and whether the last one reached its count."""
    steps: list[list[list[int]]] = []
    position, reached = 0, True
    while position < len(lengths):
        micro_batches: list[list[int]] = []
        reached = False
        while position < len(lengths) and not reached:
            members, used = [], 0
            while position < len(lengths) and used + lengths[position] <= rule.tokens_per_microbatch:
                members.append(position)
                used += lengths[position]
                position += 1
            micro_batches.append(members)
            count = sum(map(len, micro_batches))
            enough = (
                count >= rule.docs_per_step
                if rule.docs_per_step
                else len(micro_batches) >= rule.depth_first_micro_batches * rule.breadth_first_micro_batches
            )
            reached = enough and len(micro_batches) % rule.breadth_first_micro_batches == 0
        steps.append(micro_batches)
    return steps, reached


@settings(max_examples=300, deadline=None)
@given(cases(target=st.integers(1, 9), keep=True) | cases(target=st.just(0)))
def test_keep_and_static_steps_are_whole_micro_batches(case: Case) -> None:
    order = case.order()
    steps, reached = packed_by_hand([document.num_tokens for document in order], case.rule)
    last_dropped = case.drop and not reached
    queue = case.queue()
    plans = drain(queue)
    dropped = [position for members in steps[-1] for position in members] if last_dropped else []
    assert names(queue.dropped) == names([order[position] for position in dropped])
    expected = steps[:-1] if last_dropped else steps
    assert len(plans) == len(expected) * case.updates
    for number, plan in enumerate(plans):
        step = expected[number // case.updates]
        assert names(plan.documents) == names([order[position] for members in step for position in members])
        first = step[0][0]
        filled = [[first + index for index in members] for members in plan.micro_batches if members]
        assert filled == step
        breadth = case.rule.breadth_first_micro_batches
        assert len(plan.micro_batches) == -(-len(step) // breadth) * breadth


@settings(max_examples=300, deadline=None)
@given(cases())
def test_each_document_is_trained_as_often_as_asked(case: Case) -> None:
    queue = case.queue()
    seen = 0
    trained: Counter[str] = Counter()
    for plan in drain(queue):
        assert plan.documents_seen == seen
        assert plan.documents, "no step of nothing"
        seen += len(plan.documents)
        trained.update(names(plan.documents))
        for members in plan.micro_batches:
            assert sum(plan.documents[index].num_tokens for index in members) <= case.rule.tokens_per_microbatch
    assert queue.documents_seen == seen
    for name in names(queue.dropped):
        trained[name] += case.updates
    assert trained == dict.fromkeys(names(make_documents(case.lengths)), case.epochs * case.updates)
    assert queue.next_plan() is None, "the end of the data is the end"
    assert not queue.carried


@settings(max_examples=300, deadline=None)
@given(cases(), st.lists(st.integers(1, 6), max_size=4))
def test_a_restart_after_any_step_changes_nothing(case: Case, runs: list[int]) -> None:
    expected = drain(case.queue())
    queue, plans = case.queue(), []
    for steps in runs:
        for _ in range(steps):
            plan = queue.next_plan()
            plans += [] if plan is None else [plan]
        state = json.dumps(queue.state())
        carried = json.dumps([document_line(document) for document in queue.carried])
        queue = case.queue()
        queue.restore(json.loads(state), [read_document(line) for line in json.loads(carried)])
    plans += drain(queue)
    assert same_plans(plans, expected)


@pytest.mark.parametrize("count", [63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("drop", [False, True])
def test_a_step_of_many_documents(count: int, drop: bool) -> None:
    """More than the queue looks at first."""
    case = Case((1,) * count, StepRule(100, True, 1, 1, 60), drop=drop)
    plans = drain(case.queue())
    steps = [list(range(start, min(start + 120, count))) for start in range(0, count, 120)]
    if drop:
        steps = [step for step in steps if len(step) >= 100]
    assert [names(plan.documents) for plan in plans] == [[f"d{index}" for index in step] for step in steps]
    assert [len(plan.micro_batches) for plan in plans] == [-(-len(step) // 60) for step in steps]


def test_what_is_being_repeated_travels_with_the_checkpoint() -> None:
    case = Case((3, 4, 5, 6), StepRule(2, False, 1, 1, 8), updates=3)
    queue = case.queue()
    assert not queue.carried
    first = queue.next_plan()
    for _ in range(2):
        assert names(queue.carried) == ["d0", "d1"]
        assert queue.next_plan().documents == first.documents
    assert queue.carried == []
    assert names(queue.next_plan().documents) == ["d2", "d3"]


def test_a_queue_does_not_go_on_with_other_files() -> None:
    case = Case((3, 4, 5, 6), StepRule(2, False, 1, 1, 8))
    queue = case.queue()
    queue.next_plan()
    other = dataclasses.replace(case, lengths=(3, 5, 5, 6)).queue()
    with pytest.raises(SourceError):
        other.restore(queue.state(), [])


def test_grown_files_go_on_behind_what_was_trained() -> None:
    case = Case((3, 4, 5), StepRule(2, False, 1, 1, 8))
    queue = case.queue()
    queue.next_plan()
    grown = dataclasses.replace(case, lengths=(3, 4, 5, 6, 7)).queue()
    grown.restore(json.loads(json.dumps(queue.state())), [])
    assert [names(plan.documents) for plan in drain(grown)] == [["d2", "d3"], ["d4"]]


@dataclass
class Sampling:
    """Makes documents when asked, without end; every `reject_every`-th comes to nothing."""

    reject_every: int
    _made: int = 0
    versions: list[int] = field(default_factory=list)

    def take(self, count: int, documents_seen: int) -> Taken:
        self.versions.append(documents_seen)
        numbers = range(self._made, self._made + count)
        self._made += count
        return Taken([make_document(f"s{number}", 3) for number in numbers if (number + 1) % self.reject_every])

    def aside(self) -> Taken:
        return Taken()

    def state(self) -> dict[str, Any]:
        return {"made": self._made}

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        state = self.state()
        return lambda: state

    def restore(self, state: dict[str, Any]) -> None:
        self._made = state["made"]


@pytest.mark.parametrize("drop", [False, True])
def test_fewer_documents_from_a_sampler_are_no_end_of_data(drop: bool) -> None:
    source = Sampling(reject_every=3)
    queue = PlanQueue(source, StepRule(4, False, 1, 1, 8), drop_last=drop, updates_per_batch=2)
    plans = [queue.next_plan() for _ in range(6)]
    first, second, third = ["s0", "s1", "s3"], ["s4", "s6", "s7"], ["s9", "s10"]
    assert [names(plan.documents) for plan in plans] == [first, first, second, second, third, third]
    assert [plan.totals.num_documents for plan in plans] == [3, 3, 3, 3, 2, 2], "the true number, not the asked one"
    assert source.versions == [0, 6, 12], "as many as the policy had seen"
    assert queue.dropped == []


def test_a_step_of_which_everything_was_rejected_is_an_error() -> None:
    queue = PlanQueue(Sampling(reject_every=1), StepRule(4, False, 1, 1, 8))
    with pytest.raises(SourceError, match="rejected"):
        queue.next_plan()
