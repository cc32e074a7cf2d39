"""Which documents make one step, and how many micro-batches."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_documents
from truestep.rollouts.packing import fill_in_order
from truestep.step.plan.plan import StepRule, count_packed, make_plan, plan_exactly, totals_of
from truestep.types import Rollout

LENGTHS = st.lists(st.integers(1, 12), max_size=24)


def rule(documents: int, *, keep: bool = False, depth: int = 1, breadth: int = 1, budget: int = 12) -> StepRule:
    return StepRule(documents, keep, depth, breadth, budget)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(12, 40), st.integers(1, 5), st.integers(0, 1000))
def test_an_exact_plan_is_of_these_documents(lengths: list[int], budget: int, breadth: int, seen: int) -> None:
    documents = make_documents(lengths)
    plan = plan_exactly(documents, rule(len(documents), breadth=breadth, budget=budget), seen)
    assert plan.documents == documents
    assert plan.documents_seen == seen
    assert len(plan.micro_batches) % breadth == 0
    assert sorted(index for members in plan.micro_batches for index in members) == list(range(len(documents)))
    assert all(sum(lengths[index] for index in members) <= budget for members in plan.micro_batches)
    assert plan.totals.num_documents == len(lengths)
    assert plan.totals.num_tokens == sum(lengths)
    assert plan.totals.num_labels == sum(int(value) for document in documents for value in document.loss_mask)


def test_totals_of_nothing() -> None:
    totals = totals_of([])
    assert (totals.num_documents, totals.num_labels, totals.num_tokens) == (0, 0, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=8))
def test_a_plan_knows_its_documents(shapes: list[list[int]]) -> None:
    """Counted by plain loops: also of documents of sequences, one or several, and where a plan gets other documents."""
    plain = make_documents([3])
    documents = [
        joined(f"d{number}", lengths) if lengths else replace(plain[0], id=f"d{number}")
        for number, lengths in enumerate(shapes)
    ]
    plan = plan_exactly(documents, rule(len(documents), budget=40), 0)
    for each in (plan, replace(plan, documents=tuple(reversed(documents)), micro_batches=plan.micro_batches)):
        facts = each.facts
        assert facts["tokens"].tolist() == [len(document.input_ids) for document in each.documents]
        assert facts["labels"].tolist() == [sum(map(bool, document.loss_mask)) for document in each.documents]
        assert facts["starts"].tolist() == [len(document.starts) for document in each.documents]
        assert len(set(facts["id"].tolist())) == len(documents)
        owners = [number for number, document in enumerate(each.documents) for _ in document.sequences]
        assert list(each.document_of) == owners and len(each.sequences) == len(owners)
        records = [name for document in each.documents for name in document.record_ids or [document.id]]
        assert [sequence.id for sequence in each.sequences] == records
    assert plan.facts["id"].tolist() == replace(plan, documents=plan.documents).facts["id"].tolist()
    assert plan.totals.num_tokens == sum(sum(lengths) or 3 for lengths in shapes)


def test_a_document_has_no_dictionary_of_its_own() -> None:
    """Python makes one where an attribute is set by way of `__dict__`, and where there are more than 29."""
    assert not [held for held in gc.get_referents(joined("d", [3])) if isinstance(held, dict) and "input_ids" in held]


def joined(name: str, lengths: list[int]) -> Rollout:
    """A document of sequences of these lengths, in which all tokens but the first of each are labels."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    mask = np.ones(sum(lengths), bool)
    mask[starts] = False
    records = tuple(f"{name}-{number}" for number in range(len(lengths)))
    return Rollout(name, np.arange(sum(lengths)), mask, starts=tuple(starts), record_ids=records)


def test_exact_is_for_carry_with_a_target() -> None:
    assert rule(5).exact
    assert not rule(5, keep=True).exact
    assert not rule(0).exact
    assert not rule(0, keep=True).exact


def in_order(lengths: list[int], given_rule: StepRule) -> tuple[list[list[int]], bool]:
    """The micro-batches of a packed step of documents of one sequence, and whether they are final."""
    documents, micro_batches, final = count_packed([[length] for length in lengths], given_rule)
    bins = fill_in_order(lengths[:documents], given_rule.tokens_per_microbatch)
    assert len(bins) == micro_batches
    return bins, final


def test_a_packed_step_ends_before_a_document_and_not_within_one() -> None:
    # The second document's second sequence does not fit, and the step may end there: but the document is not whole.
    # The second document does not fit whole.
    assert count_packed([[8], [4, 5], [9], [1]], rule(1, keep=True)) == (1, 1, True)
    assert count_packed([[8], [4, 5], [9], [1]], rule(2, keep=True)) == (2, 2, True)
    assert count_packed([[8], [4, 4], [9]], rule(0, depth=2)) == (2, 2, True)
    # With two micro-batches at a time; an odd number of them gets an empty one.
    assert count_packed([[12, 12, 12], [12], [1]], rule(0, breadth=2)) == (2, 4, True)
    assert count_packed([[12, 12, 12], [12]], rule(0, breadth=2)) == (2, 4, False)
    assert count_packed([[12], [12, 12], [12, 12]], rule(0, breadth=2)) == (2, 3, True)


def test_a_packed_step_of_any_documents_ends() -> None:
    """Short first sequences that fit what is left, and documents of two micro-batches, an odd one first."""
    assert count_packed([[3, 10]] * 1000, rule(0, depth=1)) == (1, 2, True)
    assert count_packed([[3, 10]] * 1000, rule(2, keep=True)) == (2, 4, True)
    assert count_packed([[12], *[[12, 12]] * 1000], rule(0, breadth=2)) == (2, 3, True)
    assert count_packed([[12], *[[12, 12]] * 1000], rule(3, keep=True, breadth=2)) == (3, 5, True)


@pytest.mark.parametrize(
    ("lengths", "given_rule", "bins", "final"),
    [
        # The micro-batch that crossed the target is whole: 3 documents though 2 were asked for.
        ([4, 4, 4, 4], rule(2, keep=True), [[0, 1, 2]], True),
        # Reached, but what comes next might still fit.
        ([4, 4], rule(2, keep=True), [[0, 1]], False),
        ([4, 4, 4], rule(3, keep=True), [[0, 1, 2]], False),
        ([4, 4, 4, 1], rule(3, keep=True), [[0, 1, 2]], True),
        # The target is reached in the first, and the second makes the multiple.
        ([6, 6, 6, 6, 6], rule(2, keep=True, breadth=2), [[0, 1], [2, 3]], True),
        ([6, 6, 6], rule(2, keep=True, breadth=2), [[0, 1], [2]], False),
        # A fixed number of micro-batches: 2 x 1, then 1 x 2, then 2 x 2.
        ([12, 5, 5, 5], rule(0, depth=2), [[0], [1, 2]], True),
        ([12, 5, 5, 5], rule(0, breadth=2), [[0], [1, 2]], True),
        ([12, 5, 5, 12, 12, 1], rule(0, depth=2, breadth=2), [[0], [1, 2], [3], [4]], True),
        ([12, 5, 5, 12, 12], rule(0, depth=2, breadth=2), [[0], [1, 2], [3], [4]], False),
        ([], rule(2, keep=True), [], False),
    ],
)
def test_micro_batches_in_order_until_the_count_is_reached(lengths, given_rule, bins, final) -> None:
    assert in_order(lengths, given_rule) == (bins, final)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(0, 8), st.integers(1, 3), st.integers(1, 3), LENGTHS)
def test_more_data_changes_no_final_step(
    lengths: list[int], target: int, depth: int, breadth: int, more: list[int]
) -> None:
    chosen = rule(target, keep=True, depth=depth, breadth=breadth)
    bins, final = in_order(lengths, chosen)
    taken = [index for members in bins for index in members]
    assert taken == list(range(len(taken))), "from the front, in order"
    assert all(0 < sum(lengths[index] for index in members) <= 12 for members in bins)
    if not final:
        assert len(taken) == len(lengths)
        return
    assert in_order(lengths + more, chosen) == (bins, True)
    assert len(bins) % breadth == 0
    assert all(sum(lengths[index] for index in members) + lengths[members[-1] + 1] > 12 for members in bins), (
        "each is full: the next document did not fit"
    )
    reached = len(taken) >= target if target else len(bins) == depth * breadth
    assert reached
    # No earlier multiple of the breadth would have done.
    before = [index for members in bins[:-breadth] for index in members]
    assert len(before) < target if target else len(bins) == math.prod((depth, breadth))


def test_ranks_run_their_micro_batches_of_one_number_side_by_side() -> None:
    plan = make_plan(make_documents([3, 4, 5, 6]), [[0], [1], [2], [3]], 0, ranks=2)
    assert [plan.at_once(number) for number in (0, 1)] == [((0,), (1,)), ((2,), (3,))]
    assert [plan.of_rank(rank) for rank in (0, 1)] == [((0,), (2,)), ((1,), (3,))]
