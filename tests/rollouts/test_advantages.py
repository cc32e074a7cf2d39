from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.rollouts.advantages import assign_advantages, group_advantages
from truestep.types import Rejected, Rollout

RULES = ("group_mean", "group_normalized", "leave_one_out")


def rollout(id, reward=None, group_id="g", advantage=None, mask=(False, True, True)):
    loss_mask = np.array(mask)
    advantages = None if advantage is None else np.where(loss_mask, np.float32(advantage), np.float32(0))
    return Rollout(id, np.arange(len(mask)), loss_mask, advantages=advantages, reward=reward, group_id=group_id)


def rejected(group_id="g"):
    return Rejected("file.jsonl", 1, "bad", None, group_id)


def assigned(items, rule="group_mean", group_size=None):
    """id -> the advantage of its labels."""
    result = assign_advantages(items, rule=rule, group_size=group_size)
    return {item.id: None if item.advantages is None else float(item.advantages[1]) for item in result}


def oracle(rewards, rule):
    """By the words of docs/contract.md, section 4, one at a time."""
    count = len(rewards)
    if count == 1:
        return [0.0]
    mean = sum(rewards) / count
    if rule == "group_mean":
        return [reward - mean for reward in rewards]
    if rule == "leave_one_out":
        return [reward - sum(rewards[:i] + rewards[i + 1 :]) / (count - 1) for i, reward in enumerate(rewards)]
    variance = sum((reward - mean) ** 2 for reward in rewards) / (count - 1)
    return [(reward - mean) / (variance**0.5 + 1e-4) for reward in rewards]


rewards_of_a_group = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(rewards=rewards_of_a_group, rule=st.sampled_from(RULES))
def test_against_the_oracle(rewards, rule):
    advantages = group_advantages(np.array(rewards), rule)
    assert advantages.dtype == np.float64
    # The normalised ones divide the rounding of a mean (1e-14 here) by 1e-4 at worst.
    np.testing.assert_allclose(advantages, oracle(rewards, rule), rtol=1e-9, atol=1e-9)
    assert abs(advantages.sum()) < 1e-8


@settings(max_examples=100, deadline=None)
@given(rewards=rewards_of_a_group, rule=st.sampled_from(RULES), data=st.data())
def test_the_order_of_a_group_never_shows(rewards, rule, data):
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = group_advantages(np.array(rewards)[list(order)], rule)
    assert shuffled.tolist() == group_advantages(np.array(rewards), rule)[list(order)].tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7], [1e38] * 7, [0.0, -0.0], []])
def test_equal_rewards_and_groups_of_one_get_exactly_zero(rule, rewards):
    assert group_advantages(np.array(rewards), rule).tolist() == [0.0] * len(rewards)


def test_known_values():
    rewards = np.array([0, 0, 0, 1])
    assert group_advantages(rewards, "group_mean").tolist() == [-0.25, -0.25, -0.25, 0.75]
    np.testing.assert_allclose(group_advantages(rewards, "leave_one_out"), [-1 / 3] * 3 + [1], rtol=1e-15)
    np.testing.assert_allclose(group_advantages(rewards, "group_normalized"), np.array([-0.25] * 3 + [0.75]) / 0.5001)


def test_float32_rewards_are_computed_in_float64():
    rewards = np.array([1e8, 1e8 + 8], dtype=np.float32)
    assert group_advantages(rewards, "group_mean").tolist() == [-4, 4]


@pytest.mark.parametrize("rule", ["none", "mean", ""])
def test_an_unknown_rule(rule):
    with pytest.raises(ValueError, match="expected one of group_mean"):
        group_advantages(np.array([1.0, 2.0]), rule)
    if rule != "none":
        with pytest.raises(ValueError, match="expected one of"):
            assign_advantages([], rule=rule, group_size=None)


@pytest.mark.parametrize("rule", RULES)
def test_the_largest_rewards_stay_finite(rule):
    result = assigned([rollout("a", 1e38), rollout("b", -1e38)], rule)
    assert np.isfinite(list(result.values())).all()
    assert result["a"] > 0


def test_interleaved_groups_in_the_order_they_came():
    items = [rollout("a", 0, "x"), rollout("b", 10, "y"), rollout("c", 1, "x"), rollout("d", 20, "y")]
    result = assigned(items)
    assert list(result) == ["a", "b", "c", "d"]
    assert result == {"a": -0.5, "b": -5, "c": 0.5, "d": 5}


def test_a_full_group_closes_and_its_name_opens_a_new_one():
    items = [rollout(name, reward) for name, reward in zip("abcde", [0, 1, 10, 20, 7], strict=True)]
    assert assigned(items, group_size=2) == {"a": -0.5, "b": 0.5, "c": -5, "d": 5, "e": 0}
    assert assigned(items, group_size=None)["e"] == pytest.approx(7 - 38 / 5)
    assert set(assigned(items, group_size=1).values()) == {0}


def test_a_rejected_member_fills_a_place_and_the_rest_share_the_baseline():
    items = [rollout("a", 0), rejected(), rollout("b", 1), rollout("c", 10), rollout("d", 30), rejected()]
    assert assigned(items, group_size=3) == {"a": -0.5, "b": 0.5, "c": -10, "d": 10}
    assert assigned([rollout("a", 5), rejected()], group_size=2) == {"a": 0}


def test_a_rejected_record_without_a_readable_group_fills_none():
    items = [rollout("a", 0), rejected(None), rollout("b", 1), rollout("c", 5)]
    assert assigned(items, group_size=2) == {"a": -0.5, "b": 0.5, "c": 0}


def test_an_advantage_of_its_own_is_kept_and_is_no_part_of_the_baseline():
    items = [rollout("a", 0), rollout("own", 1000, advantage=3.25), rollout("b", 1), rollout("c", 9)]
    assert assigned(items, group_size=3) == {"a": -0.5, "own": 3.25, "b": 0.5, "c": 0}


def test_rollouts_without_what_the_rule_needs_stay_as_they_are():
    items = [rollout("a", None), rollout("b", 1, None), rollout("c", 3), rollout("d", 5)]
    assert assigned(items) == {"a": None, "b": None, "c": -1, "d": 1}
    assert set(assigned(items, "none").values()) == {None}


def test_advantages_are_on_labels_in_float32_and_the_input_is_not_edited():
    first, second = rollout("a", 0, mask=(False, True, False, True)), rollout("b", 1, mask=(False,))
    result = assign_advantages([first, second], rule="group_mean", group_size=2)
    assert result[0].advantages.tolist() == [0, -0.5, 0, -0.5]
    assert result[1].advantages.tolist() == [0]  # no label, and yet part of the baseline
    assert {item.advantages.dtype for item in result} == {np.dtype(np.float32)}
    assert not np.signbit(result[0].advantages[0])
    assert first.advantages is None
    assert replace(result[0], advantages=None).input_ids is first.input_ids


@settings(max_examples=200, deadline=None)
@given(
    members=st.lists(
        st.tuples(st.sampled_from("xyz"), st.floats(-5, 5), st.sampled_from(["scored", "own", "rejected"])), max_size=25
    ),
    group_size=st.none() | st.integers(1, 4),
    rule=st.sampled_from(RULES),
)
def test_groups_against_an_oracle(members, group_size, rule):
    items, groups = [], {}
    for position, (group_id, reward, kind) in enumerate(members):
        own = 7.0 if kind == "own" else None
        items.append(rejected(group_id) if kind == "rejected" else rollout(str(position), reward, group_id, own))
        opened = groups.setdefault(group_id, [[]])
        if group_size is not None and len(opened[-1]) == group_size:
            opened.append([])
        opened[-1].append(position)
    result = assigned(items, rule, group_size)
    assert list(result) == [str(i) for i, member in enumerate(members) if member[2] != "rejected"]
    for group in (group for opened in groups.values() for group in opened):
        scored = [position for position in group if members[position][2] == "scored"]
        expected = oracle([members[position][1] for position in scored], rule) if scored else []
        found = [result[str(position)] for position in scored]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert all(result[str(i)] == 7 for i, member in enumerate(members) if member[2] == "own")
