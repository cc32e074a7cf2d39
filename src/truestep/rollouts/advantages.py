"""Advantages from the rewards of a group: the rollouts of one prompt."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from truestep.types import Rejected, Rollout

RULES = ("group_mean", "group_normalized", "leave_one_out")
STANDARD_DEVIATION_FLOOR = 1e-4


def group_advantages(rewards: np.ndarray, rule: str) -> np.ndarray:
    """Make an advantage of each reward, in float64. A group of one, and a group of equal rewards, gets exactly 0.

    The sums are exact (`fsum`), so the order of a group's members never shows in the result.
    """
    _check_rule(rule, RULES)
    rewards = np.asarray(rewards, dtype=np.float64)
    count = len(rewards)
    if count < 2 or (rewards == rewards[0]).all():
        return np.zeros(count)
    deviations = rewards - math.fsum(rewards) / count
    if rule == "group_mean":
        return deviations
    if rule == "leave_one_out":  # reward - mean of the others, without the cancellation of a sum less one term
        return deviations * (count / (count - 1))
    standard_deviation = math.sqrt(math.fsum(deviations**2) / (count - 1))
    return deviations / (standard_deviation + STANDARD_DEVIATION_FLOOR)


def assign_advantages(items: Iterable[Rollout | Rejected], *, rule: str, group_size: int | None) -> list[Rollout]:
    """List the rollouts in the order they came, with advantages from their groups; rejected records are left out.

    A group closes at `group_size` members, and a later record of the same `group_id` opens a new one; otherwise it
    closes at the end. Every record with a readable `group_id` is a member: a rejected one, and one that carries its
    own advantage, fill a place and are no part of the baseline. Rollouts without what the rule needs (a reward and a
    group) stay as they are, and with the rule `none` all do.
    """
    _check_rule(rule, (*RULES, "none"))
    rollouts: list[Rollout] = []
    open_groups: dict[str, _Group] = {}
    for item in items:
        if isinstance(item, Rollout):
            rollouts.append(item)
        if rule == "none" or item.group_id is None:
            continue
        group = open_groups.setdefault(item.group_id, _Group())
        group.members += 1
        if isinstance(item, Rollout) and item.advantages is None and item.reward is not None:
            group.scored.append(len(rollouts) - 1)
        if group.members == group_size:
            _close(open_groups.pop(item.group_id), rollouts, rule)
    for group in open_groups.values():
        _close(group, rollouts, rule)
    return rollouts


@dataclass
class _Group:
    members: int = 0
    scored: list[int] = field(default_factory=list)  # which rollouts share the baseline


def _close(group: _Group, rollouts: list[Rollout], rule: str) -> None:
    rewards = np.array([rollouts[index].reward for index in group.scored], dtype=np.float64)
    for index, advantage in zip(group.scored, group_advantages(rewards, rule), strict=True):
        on_labels = np.where(rollouts[index].loss_mask, np.float32(advantage), np.float32(0))
        rollouts[index] = replace(rollouts[index], advantages=on_labels)


def _check_rule(rule: str, rules: tuple[str, ...]) -> None:
    if rule not in rules:
        raise ValueError(f"advantage rule {rule!r}: expected one of {', '.join(rules)}")
