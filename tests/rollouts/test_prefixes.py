"""Shared prefixes in packing and plans: every sequence is a path of segments, and a plan packs each once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_document
from truestep.rollouts.packing import pack
from truestep.rollouts.prefixes import find_segments, forest_of, identities, share
from truestep.step.plan.plan import StepRule, plan_exactly, plan_packed
from truestep.step.plan.trees import find_ties, make_items
from truestep.step.update.blame import only
from truestep.types import ROUTES, Rollout, Sharing, StepPlan

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence) for sequence in sequences]


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, st.integers(1, 6))
def test_a_sequence_is_the_path_of_its_segments(sequences: list[list[int]], least: int) -> None:
    forest = find_segments(arrays(sequences), least)
    for sequence, last in zip(sequences, forest.last, strict=True):
        spelled: list[int] = []
        for number in forest.path(last):
            segment = forest.segments[number]
            assert segment.parent < number and segment.start == len(spelled)
            spelled += sequences[segment.source][segment.start : segment.stop]
        assert spelled == sequence
    beginnings = {tuple(sequence[: at + 1]) for sequence in sequences for at in range(len(sequence))}
    assert len(beginnings) <= forest.tokens <= sum(map(len, sequences))
    if least == 1:
        assert forest.tokens == len(beginnings), "each beginning is computed once"


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, st.integers(9, 40), st.integers(1, 6))
def test_items_hold_each_sequence_once_and_fit(sequences: list[list[int]], limit: int, least: int) -> None:
    items = make_items(find_ties(arrays(sequences), least), limit, 100.0)
    assert sorted(member for item in items for member in item.members) == list(range(len(sequences)))
    for item in items:
        chosen = arrays([sequences[member] for member in item.members])
        assert find_segments(chosen).tokens <= item.tokens <= limit


def documents(groups: int, size: int, prefix: int, answer: int) -> list[Rollout]:
    draw = np.random.default_rng(3)
    made = []
    for group in range(groups):
        shared = draw.integers(0, 61, prefix)
        for member in range(size):
            one = make_document(f"{group}-{member}", prefix + answer, seed=group * size + member)
            ids = np.concatenate([shared, draw.integers(0, 61, answer)])
            made.append(dataclasses.replace(one, input_ids=ids))
    return made


def rule(share: str, budget: int = 512, ranks: int = 1) -> StepRule:
    return StepRule(0, False, 1, 1, budget, ranks, even_length=1000.0, share=share)  # type: ignore[arg-type]


def test_auto_shares_where_it_pays() -> None:
    long, short = documents(6, 4, 60, 20), documents(6, 4, 1, 40)
    assert plan_exactly(long, rule("auto"), 0).sharing is not None
    assert plan_exactly(short, rule("auto"), 0).sharing is None
    assert plan_exactly(short, rule("always"), 0).sharing == Sharing(1, 512)
    assert plan_exactly(long, rule("off"), 0).sharing is None
    alone, together = (plan_exactly(long, rule(share), 0) for share in ("off", "auto"))
    assert len(together.micro_batches) < len(alone.micro_batches)


@pytest.mark.parametrize("make", [plan_exactly, plan_packed])
def test_auto_shares_nothing_where_the_device_waits_for_the_host_anyway(make: Any) -> None:
    many = documents(6, 4, 60, 20)  # 1,920 tokens in four micro-batches: 480 each
    for busy, shares in ((450.0, True), (900.0, False)):
        assert (make(many, dataclasses.replace(rule("auto"), busy=busy), 0).sharing is not None) is shares
    assert make(many, dataclasses.replace(rule("always"), busy=900.0), 0).sharing is not None


def test_no_micro_batch_of_a_shared_plan_exceeds_its_budget() -> None:
    """Trees that do not fit are divided, and a first word that all documents share ties nothing together."""
    many = [
        dataclasses.replace(one, input_ids=np.concatenate([[7], one.input_ids[1:]])) for one in documents(5, 12, 40, 30)
    ]
    for mode in ("auto", "always"):
        for ranks in (1, 3):
            plan = plan_exactly(many, rule(mode, budget=200, ranks=ranks), 0)
            assert plan.sharing is not None
            sizes = [
                pack([plan.sequences[index] for index in members], forest=forest_of(plan, members)).tokens.num_tokens
                for members in plan.micro_batches
            ]
            assert max(sizes) <= 200
            assert sum(sizes) < 0.7 * plan.totals.num_tokens


@pytest.mark.parametrize("budget", [80, 120, 200, 4096])
def test_a_plan_knows_which_tokens_of_prefixes_are_computed_again(budget: int) -> None:
    """A tree of 60 + 8 x 20 tokens: each micro-batch computes the prefix, and one of 80 tokens has one answer."""
    plan = plan_exactly(documents(3, 8, 60, 20), rule("always", budget=budget), 0)
    assert plan.distinct == 3 * (60 + 8 * 20)
    assert (computed_by(plan) > plan.distinct) == (budget < 220)
    assert plan_exactly(documents(3, 8, 60, 20), rule("auto", budget=budget), 0).distinct == plan.distinct
    assert plan_exactly(documents(3, 8, 60, 20), dataclasses.replace(rule("auto"), busy=1e9), 0).distinct is None
    assert plan_exactly(documents(3, 8, 60, 20), rule("off", budget=budget), 0).distinct is None


@pytest.mark.parametrize(
    ("trees", "budget", "share", "times"),
    [
        ((1, 8, 500, 500), 4000, "always", 2),
        ((1, 8, 500, 500), 4000, "auto", None),  # documents alone cost less on so many ranks
        ((2, 8, 900, 200), 2400, "auto", None),
        ((1, 16, 800, 100), 4096, "always", 2),
    ],
)
def test_what_many_ranks_compute_again_is_that_of_the_chosen_plan(
    trees: tuple[int, int, int, int], budget: int, share: str, times: int | None
) -> None:
    """With few trees, these are divided into smaller parts than the budget asks for, or not shared at all. `times`: how
    many micro-batches compute a tree's prefix."""
    plan = plan_exactly(documents(*trees), rule(share, budget, ranks=8), 0)
    assert (plan.sharing is not None) == (times is not None)
    if times is None:
        assert plan.distinct is None
    else:
        count, size, prefix, answer = trees
        assert plan.distinct == count * (prefix + size * answer)
        again = count * (times - 1) * prefix
        # Answers whose first tokens are equal by chance share these.
        assert again - size < computed_by(plan) - plan.distinct <= again


def computed_by(plan: StepPlan) -> int:
    computed = 0
    for members in plan.micro_batches:
        forest = forest_of(plan, members)
        tokens = sum(plan.sequences[index].num_tokens for index in members)
        computed += tokens if forest is None else forest.tokens
    return computed


def test_a_plan_keeps_the_segments_of_its_micro_batches() -> None:
    plan = plan_exactly(documents(3, 6, 40, 30), rule("always", budget=400), 0)
    found = [forest_of(plan, members) for members in plan.micro_batches]
    assert any(forest is not None for forest in found)
    later = dataclasses.replace(plan, repeated=True)
    assert all(forest_of(later, members) is forest for members, forest in zip(plan.micro_batches, found, strict=True))


def conversations(count: int, turns: int) -> list[Rollout]:
    """Each turn sees 100 more tokens, and thinks 60 that later turns do not see."""
    draw, made = np.random.default_rng(5), []
    for number in range(count):
        seen = draw.integers(0, 61, 100 * turns)
        for turn in range(turns):
            ids = np.concatenate([seen[: 100 * (turn + 1)], np.full(60, 1000 + turn)])
            made.append(dataclasses.replace(make_document(f"{number}-{turn}", len(ids), number), input_ids=ids))
    return made


def test_short_turns_stay_with_the_conversation_that_goes_on() -> None:
    """Each saves little beside all the turns that follow it, but most of itself. All of a conversation are 20 x 160
    tokens."""
    plan = plan_exactly(conversations(5, 20), rule("auto", budget=4000), 0)
    assert len(plan.micro_batches) == 5 and plan.distinct == computed_by(plan)
    for members in plan.micro_batches:
        forest = forest_of(plan, members)
        assert forest is not None and forest.tokens == 20 * 160
        assert len({plan.sequences[index].id.partition("-")[0] for index in members}) == 1
    divided = plan_exactly(conversations(5, 20), rule("auto", budget=2500), 0)
    assert len(divided.micro_batches) == 10, "two of each conversation, of which both compute what they have in common"
    assert divided.distinct == 5 * 20 * 160 < computed_by(divided)


def test_few_trees_are_divided_to_keep_all_ranks_busy() -> None:
    plan = plan_exactly(documents(1, 16, 16, 60), rule("auto", budget=4096, ranks=4), 0)
    sizes = [len(members) for members in plan.micro_batches]
    assert len(sizes) == 4 and min(sizes) >= 2


def test_sharing_never_changes_which_documents_a_packed_step_has() -> None:
    many = documents(6, 4, 60, 20)
    alone, together = (plan_packed(many, rule(share), 0) for share in ("off", "always"))
    assert alone.micro_batches == together.micro_batches and together.sharing is not None


def test_a_row_where_documents_part_has_a_label_of_each() -> None:
    ids = [[1, 2, 3], [1, 2, 4], [1, 2]]
    three = of_ids(*ids)
    batch = pack(three, 4, forest=share(three, Sharing()))
    assert batch.tokens.input_ids.tolist() == [1, 2, 3, 4] and batch.tokens.position_ids.tolist() == [0, 1, 2, 2]
    assert batch.tokens.segments.tolist() == [0, 2, 3, 4] and batch.tokens.parents == (-1, 0, 0)
    assert batch.labels.rows.tolist() == [1, 1, 0] and batch.labels.ids.tolist() == [3, 4, 2]
    assert batch.tokens.sequences is not None and batch.tokens.sequences.tolist() == [3, 3, 1, 1]
    assert math.prod(batch.labels.document.tolist()) == 0 and batch.labels.num_labels.tolist() == [1, 1, 1]


def of_ids(*ids: list[int]) -> list[Rollout]:
    return [
        Rollout(id=str(number), input_ids=np.array(own), loss_mask=np.arange(len(own)) == len(own) - 1)
        for number, own in enumerate(ids)
    ]


def test_some_documents_of_a_plan_have_segments_of_their_own() -> None:
    """Where an error's cause is looked for, halves of a step are computed."""
    documents = of_ids([1, 2, 3], [1, 2, 4], [7, 8, 9], [5, 6])
    plan = plan_exactly(documents, StepRule(4, False, 1, 1, 64, share="always"), 0)
    (members,) = plan.micro_batches
    assert forest_of(plan, members) is not None
    for some in ([2, 3], [0, 1], [1, 3]):
        half = only(plan, some)
        kept = [plan.documents[index].input_ids for index in some]
        (members,) = half.micro_batches
        packed = pack([half.sequences[index] for index in members], forest=forest_of(half, members))
        assert packed.tokens.num_tokens == find_segments(kept).tokens
        assert set(packed.tokens.input_ids.tolist()) <= {int(token) for ids in kept for token in ids}


def test_tokens_of_other_ids_are_never_alike_whatever_their_experts() -> None:
    def routed(token: int, expert: int) -> Rollout:
        routes = np.ones((3, 1, 2), np.int16)
        routes[1, 0, 0] = expert
        return dataclasses.replace(of_ids([7, token, 3])[0], token_fields={ROUTES: routes})

    seen: dict[int, tuple[int, int]] = {}
    for token in range(16):
        for expert in range(16):
            (numbers,) = identities([routed(token, expert)], (ROUTES,))
            assert seen.setdefault(int(numbers[1]), (token, expert)) == (token, expert)
