"""Baselines, scales, penalties and a user's own advantages, against plain float64 loops."""

import dataclasses
import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts import own_advantages
from rollouts.rollout_records import load, write
from truestep.rollouts.advantages import (
    AdvantageError,
    AdvantageRule,
    OverlongPenalty,
    assign_advantages,
    group_advantages,
    scale_over_step,
)
from truestep.rollouts.documents import document_line, read_document
from truestep.rollouts.record import Needs
from truestep.step.plan.agreement import digests_of_plan
from truestep.step.plan.plan import StepRule, plan_exactly, plan_packed
from truestep.tools.verify.oracle.records import read_documents
from truestep.types import Rollout, Turn

BASELINES = ("group_mean", "leave_one_out", "length_weighted")
OWN = "rollouts.own_advantages"


def record(index, reward, group, labels, **fields):
    ids = list(range(labels + 1))
    return {
        "id": f"d{index}",
        "input_ids": ids,
        "prompt_length": 1,
        "logprobs": [-0.5] * labels,
        "reward": reward,
        "group_id": group,
    } | fields


def rollouts_of(records, rule):
    """As files do it, without files."""
    items = [
        Rollout(
            id=line["id"],
            input_ids=np.array(line["input_ids"]),
            loss_mask=np.arange(len(line["input_ids"])) >= 1,
            reward=line["reward"],
            group_id=line["group_id"],
            rewards=line.get("rewards", {}),
            turns=tuple(Turn(**turn) for turn in line.get("turns", ())),
        )
        for line in records
    ]
    return assign_advantages(items, rule=rule, group_size=None)


def first_label(rollout):
    return float(rollout.advantages[-1]) if rollout.num_labels else None


members = st.lists(
    st.tuples(st.floats(-50, 50), st.sampled_from("xyz"), st.integers(0, 9)), min_size=1, max_size=16
).filter(lambda chosen: all(any(n for _, g, n in chosen if g == group) for _, group, _ in chosen))


@settings(max_examples=300, deadline=None)
@given(
    chosen=members,
    name=st.sampled_from((*BASELINES, "group_normalized", "batch_normalized")),
    scale=st.sampled_from(["none", "group", "step"]),
    floor=st.sampled_from([1e-4, 0.5]),
)
def test_every_baseline_and_scale_against_the_oracle(chosen, name, scale, floor):
    scale = None if name.endswith("normalized") else scale
    records = [record(index, *member) for index, member in enumerate(chosen)]
    options = {"advantages": name, "advantage_scale": scale, "advantage_std_floor": floor}
    wanted = read_documents(records, options)
    rule = AdvantageRule.of(name, scale, floor)
    plan = plan_packed(rollouts_of(records, rule), StepRule(0, False, 1, 1, 64, advantage_std_floor=floor), 0)
    for document, expected in zip(plan.documents, wanted, strict=True):
        assert document.difference is None
        np.testing.assert_allclose(document.advantages[document.loss_mask], expected.advantages, rtol=1e-5, atol=1e-5)


def test_known_values_of_length_weighted():
    # (2 * 1 + 6 * 0) / 8 = 0.25
    assert group_advantages(np.array([1.0, 0.0]), "length_weighted", [2, 6]).tolist() == [0.75, -0.25]
    assert group_advantages(np.array([1.0, 0.0]), "length_weighted", [0, 0]).tolist() == [0.5, -0.5]
    with pytest.raises(ValueError, match="number of labels"):
        group_advantages(np.array([1.0, 0.0]), "length_weighted")


@pytest.mark.parametrize("scale", ["none", "group", "step"])
@pytest.mark.parametrize("name", BASELINES)
def test_groups_of_one_and_equal_rewards_get_exactly_zero(name, scale):
    records = [record(0, 0.1, "x", 3), record(1, 7.0, "y", 2), record(2, 7.0, "y", 5)]
    documents = scale_over_step(rollouts_of(records, AdvantageRule.of(name, scale, 0.0)), 0.0)
    assert [first_label(document) for document in documents] == [0.0] * 3


@settings(max_examples=100, deadline=None)
@given(chosen=members, data=st.data())
def test_a_scale_over_the_step_is_the_same_in_any_order(chosen, data):
    records = [record(index, *member) for index, member in enumerate(chosen)]
    documents = rollouts_of(records, AdvantageRule.of("batch_normalized"))
    order = data.draw(st.permutations(range(len(documents))))
    scaled = scale_over_step(documents, 1e-4)
    shuffled = scale_over_step([documents[index] for index in order], 1e-4)
    for at, index in enumerate(order):
        assert shuffled[at].advantages.tobytes() == scaled[index].advantages.tobytes()
    again = scale_over_step(scaled, 1e-4)
    assert [d.advantages.tobytes() for d in again] == [d.advantages.tobytes() for d in scaled], "never scaled twice"


def test_it_is_the_step_that_is_scaled_over_and_not_a_rank_or_a_micro_batch():
    records = [record(index, float(index % 5), str(index // 4), 1 + index % 7) for index in range(16)]
    documents = rollouts_of(records, AdvantageRule.of("batch_normalized"))
    plans = [
        plan_exactly(documents, StepRule(16, False, 1, breadth, budget, ranks), 0)
        for ranks in (1, 2, 4)
        for breadth in (1, 2)
        for budget in (8, 9, 1000)
    ]
    wanted = [document.advantages.tobytes() for document in plans[0].documents]
    for plan in plans:
        assert [document.advantages.tobytes() for document in plan.documents] == wanted
    half = plan_exactly(documents[:8], StepRule(8, False, 1, 1, 1000), 0)
    assert [document.advantages.tobytes() for document in half.documents] != wanted[:8]


def test_own_advantages_are_no_part_of_the_steps_scale(tmp_path):
    lines = [record(0, 0.0, "x", 2), record(1, 4.0, "x", 2), record(2, 9.0, "x", 2, advantage=100.0)]
    needs = Needs(logprobs=True, advantages=True, advantage_rule="batch_normalized")
    documents = load(write(tmp_path / "a.jsonl", *lines), needs=needs).rollouts
    spread = math.sqrt(8) + 1e-4
    assert [first_label(d) for d in scale_over_step(documents, 1e-4)] == pytest.approx([-2 / spread, 2 / spread, 100])


def test_a_difference_survives_a_checkpoint():
    (first, _) = rollouts_of([record(0, 0.1, "x", 2), record(1, 0.7, "x", 2)], AdvantageRule.of("batch_normalized"))
    again = read_document(json.loads(json.dumps(document_line(first))))
    assert again.difference == first.difference != 0


def test_the_plans_digest_has_the_advantages():
    """A user's function that gives every rank other numbers must not go unnoticed."""
    documents = rollouts_of([record(0, 0.0, "x", 2), record(1, 1.0, "x", 2)], "group_mean")
    other = [dataclasses.replace(documents[0], advantages=documents[0].advantages * 2), documents[1]]
    rule = StepRule(2, False, 1, 1, 100)
    one, another = (digests_of_plan(plan_exactly(each, rule, 0), 0) for each in (documents, other))
    assert one != another


GROUP = [record(at, float(at), "g", at + 1, rewards={"format": at / 2}) for at in range(3)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("against_the_best", [-2, -1, 0]),
        ("as_array", [0, 1, 2]),
        ("as_tensor", [0, 1, 2]),
        ("by_parts", [-1, -1, -1]),
    ],
)
def test_a_users_own(function, expected):
    documents = rollouts_of(GROUP, f"{OWN}:{function}")
    assert [first_label(document) for document in documents] == expected
    assert [first_label(d) for d in rollouts_of(GROUP[:1], f"{OWN}:{function}")] == [
        0 if function == "against_the_best" else expected[0]
    ]


def test_a_users_own_with_a_scale():
    rule = AdvantageRule.of(f"{OWN}:against_the_best", "group", 0.5)
    assert [first_label(d) for d in rollouts_of(GROUP, rule)] == pytest.approx([-2 / 1.5, -1 / 1.5, 0])
    rule = AdvantageRule.of(f"{OWN}:against_the_best", "step")
    documents = scale_over_step(rollouts_of(GROUP, rule), 0.5)
    assert [first_label(d) for d in documents] == pytest.approx([-2 / 1.5, -1 / 1.5, 0])


def test_a_users_own_gives_a_number_for_each_token_or_label():
    turns = [{"start": 0, "end": 2, "role": "user"}, {"start": 2, "end": 3, "role": "assistant", "reward": 4.0}]
    records = [record(0, 1.0, "g", 2, turns=turns), record(1, 3.0, "g", 2)]
    by_turns = rollouts_of(records, f"{OWN}:by_turns")
    assert [document.advantages.tolist() for document in by_turns] == [[0, -1, 2], [0, 1, 1]]
    by_label = rollouts_of(records, f"{OWN}:by_label")
    assert [document.advantages.tolist() for document in by_label] == [[0, -1.5, -0.5]] * 2
    scaled = rollouts_of(records, AdvantageRule.of(f"{OWN}:by_turns", "group", 0.0))
    np.testing.assert_allclose(scaled[0].advantages, [0, -1 / 2**0.5, 2 / 2**0.5], rtol=1e-6)
    with pytest.raises(AdvantageError, match="with data.advantage_scale: step each has one number"):
        rollouts_of(records, AdvantageRule.of(f"{OWN}:by_turns", "step"))


def test_the_page_shows_the_advantages_of_turns():
    page = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    assert inspect.getsource(own_advantages.by_turns) in page


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("of_some_length", "the advantage of record 0 (d0) has 99 values: expected 2 (one a token) or 1 (one a label)"),
        ("with_a_nan", "the advantage of record 0 (d0) is nan: expected a finite number"),
        ("too_few", "2 advantages for 3 records: expected one for each"),
        ("not_finite", "the advantage of record 1 (d1) is nan: expected a finite number"),
        ("text", "the advantage of record 0 (d0) is '1': expected a finite number"),
        ("raises", r"KeyError: 'no such\x1b[31m thing'"),
        ("exits", "SystemExit: 3"),
        ("nothing", "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_users_own_that_fails_is_one_clear_error(function, problem):
    with pytest.raises(AdvantageError) as caught:
        rollouts_of(GROUP, f"{OWN}:{function}")
    assert str(caught.value) == f"data.advantages '{OWN}:{function}': group g: {problem}"


PENALTY = OverlongPenalty(2, 6, 0.5)


@pytest.mark.parametrize(("labels", "less"), [(0, 0), (2, 0), (3, 0.125), (4, 0.25), (6, 0.5), (100, 0.5)])
def test_the_penalty_grows_linearly(labels, less):
    assert PENALTY.of(labels) == less


@pytest.mark.parametrize("name", [*BASELINES, "group_normalized", f"{OWN}:as_array"])
def test_the_penalty_comes_before_advantages_and_is_a_part_of_the_reward(name):
    records = [record(0, 1.0, "g", 2, rewards={"answer": 1.0}), record(1, 1.0, "g", 4), record(2, 0.0, "g", 9)]
    less = [0.0, 0.25, 0.5]
    by_hand = [line | {"reward": line["reward"] - taken} for line, taken in zip(records, less, strict=True)]
    documents = rollouts_of(records, AdvantageRule.of(name, penalty=PENALTY))
    wanted = rollouts_of(by_hand, name)
    for document, expected, taken in zip(documents, wanted, less, strict=True):
        assert document.advantages.tobytes() == expected.advantages.tobytes()
        assert document.reward == expected.reward
        assert document.rewards == expected.rewards | {"overlong_penalty": -taken}
