"""Advantages from the rewards of a group, the rollouts of one prompt: a baseline and a scale."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from truestep.config.custom import load_custom
from truestep.errors import TruestepError
from truestep.rollouts.values import LARGEST_FLOAT32, describe
from truestep.text import printable
from truestep.types import Rejected, Rollout

BASELINES = ("group_mean", "leave_one_out", "length_weighted")
_NAMED_SCALES = {"group_normalized": "group", "batch_normalized": "step"}  # names for group_mean with this scale
RULES = (*BASELINES, *_NAMED_SCALES)
STANDARD_DEVIATION_FLOOR = 1e-4
PENALTY = "overlong_penalty"  # its name among the parts of a reward

# A user's own: from a group's records to one advantage for each.
GroupFunction = Callable[[Sequence[Rollout]], Sequence[float]]


class AdvantageError(TruestepError):
    """The failure of a user's own advantages."""


@dataclass(frozen=True)
class OverlongPenalty:
    """What a long completion's reward is less by: nothing up to `start` labels, `weight` from `end` labels on."""

    start: int
    end: int
    weight: float

    def of(self, num_labels: int) -> float:
        return self.weight * min(max((num_labels - self.start) / (self.end - self.start), 0.0), 1.0)


@dataclass(frozen=True)
class AdvantageRule:
    """How rewards become advantages."""

    baseline: str  # one of BASELINES, none (records carry `advantage`), or a user's package.module:function
    scale: str = "none"  # none, group or step
    floor: float = STANDARD_DEVIATION_FLOOR
    penalty: OverlongPenalty | None = None
    function: GroupFunction | None = None

    @staticmethod
    def of(
        name: str,
        scale: str | None = None,
        floor: float = STANDARD_DEVIATION_FLOOR,
        penalty: OverlongPenalty | None = None,
    ) -> "AdvantageRule":
        """Make the rule that `data.advantages` names; a user's function is imported."""
        if ":" in name:
            return AdvantageRule(name, scale or "none", floor, penalty, load_custom("data.advantages", name))
        if name not in (*RULES, "none"):
            raise ValueError(f"advantage rule {name!r}: expected one of {', '.join((*RULES, 'none'))}")
        baseline = "group_mean" if name in _NAMED_SCALES else name
        return AdvantageRule(baseline, scale or _NAMED_SCALES.get(name, "none"), floor, penalty)

    @property
    def from_rewards(self) -> bool:
        return self.baseline != "none"


def as_rule(rule: AdvantageRule | str) -> AdvantageRule:
    return AdvantageRule.of(rule) if isinstance(rule, str) else rule


def group_advantages(
    rewards: np.ndarray, rule: AdvantageRule | str, num_labels: Sequence[int] | None = None
) -> np.ndarray:
    """Make an advantage of each reward by a rule of ours, in float64, before a scale over the whole step.

    A group of one, and a group of equal rewards, gets exactly 0. The sums are exact (`fsum`), so the order of a group's
    members never shows in the result.
    """
    rule = as_rule(rule)
    if rule.baseline not in BASELINES:
        raise ValueError(f"advantage rule {rule.baseline!r}: expected one of {', '.join(RULES)}")
    rewards = np.asarray(rewards, dtype=np.float64)
    return _scaled(_differences(rewards, rule.baseline, num_labels), rewards, rule)


def _differences(rewards: np.ndarray, baseline: str, num_labels: Sequence[int] | None) -> np.ndarray:
    count = len(rewards)
    if count < 2 or (rewards == rewards[0]).all():
        return np.zeros(count)
    deviations = rewards - math.fsum(rewards) / count
    if baseline == "leave_one_out":  # reward - mean of the others, without the cancellation of a sum less one term
        return deviations * (count / (count - 1))
    if baseline == "length_weighted":
        if num_labels is None or len(num_labels) != count:
            raise ValueError("length_weighted needs the number of labels of each record")
        labels = np.asarray(num_labels, dtype=np.float64)
        # Where no document has a label, there is nothing to weigh by and nothing to train.
        return deviations - math.fsum(deviations * labels) / max(labels.sum(), 1.0)
    return deviations


def _scaled(differences: np.ndarray, rewards: np.ndarray, rule: AdvantageRule) -> np.ndarray:
    """Divide by the spread of the group's rewards, where the rule says so."""
    return differences if rule.scale != "group" else _over_spread(differences, rewards, rule.floor)


def _over_spread(differences: np.ndarray, values: np.ndarray, floor: float) -> np.ndarray:
    """Divide by the sample's standard deviation of `values` and the floor; 0 where so few values have no spread."""
    if len(values) < 2:
        return np.zeros(len(differences))
    deviations = values - math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum(deviations**2) / (len(values) - 1)) + floor
    return np.where(differences == 0, 0.0, differences / spread) if spread else np.zeros(len(differences))


def with_group_advantages(group: Sequence[Rollout], rule: AdvantageRule) -> list[Rollout]:
    """Give the documents of one group, which all have a reward, their advantages. Where these are to be scaled over
    their step, each document keeps its difference until the step is known."""
    penalised = [_penalised(rollout, rule.penalty) for rollout in group]
    rewards = np.array([rollout.reward for rollout in penalised], dtype=np.float64)
    if rule.function is None:
        differences = _differences(rewards, rule.baseline, [rollout.num_labels for rollout in penalised])
    else:
        differences = _of_user(penalised, rule) if penalised else rewards
    advantages = _scaled(differences, rewards, rule)
    return [
        replace(
            rollout,
            advantages=_on_labels(rollout, advantage),
            difference=float(advantage) if rule.scale == "step" else None,
        )
        for rollout, advantage in zip(penalised, advantages, strict=True)
    ]


def _penalised(rollout: Rollout, penalty: OverlongPenalty | None) -> Rollout:
    assert rollout.reward is not None
    if penalty is None:
        return rollout
    less = penalty.of(rollout.num_labels)
    return replace(rollout, reward=rollout.reward - less, rewards={**rollout.rewards, PENALTY: -less})


def _of_user(group: Sequence[Rollout], rule: AdvantageRule) -> np.ndarray:
    """Call a user's function with a group, and check what it gives."""
    assert rule.function is not None
    where = f"data.advantages {rule.baseline!r}: group {printable(group[0].group_id)}"
    try:
        given: Any = rule.function(list(group))
        values = list(given.tolist() if hasattr(given, "tolist") else given)
    except (Exception, SystemExit) as error:  # the function is the user's: it can raise anything
        raise AdvantageError(f"{where}: {type(error).__name__}: {printable(error)}") from error
    if len(values) != len(group):
        raise AdvantageError(f"{where}: {len(values)} advantages for {len(group)} records: expected one for each")
    numbers = [item() if callable(item := getattr(value, "item", None)) else value for value in values]
    for index, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST_FLOAT32:
            raise AdvantageError(
                f"{where}: the advantage of record {index} ({printable(group[index].id)}) is {describe(number)}: "
                "expected a finite number"
            )
    return np.array(numbers, dtype=np.float64)


def _on_labels(rollout: Rollout, advantage: float) -> np.ndarray:
    return np.where(rollout.loss_mask, np.float32(advantage), np.float32(0))


def zero(group: Sequence[Rollout]) -> list[float]:
    """Give every document the advantage 0, as data.advantages: what is left to learn from is the divergence from a
    reference in the reward."""
    return [0.0] * len(group)


def scale_over_step(documents: Sequence[Rollout], floor: float) -> list[Rollout]:
    """Divide the differences of a step's documents by their standard deviation over the whole step and the floor.

    The sums are exact, so neither the order of documents nor their ranks show in the result.
    """
    scaled = [index for index, document in enumerate(documents) if document.difference is not None]
    differences = np.array([documents[index].difference for index in scaled], dtype=np.float64)
    result = list(documents)
    for index, advantage in zip(scaled, _over_spread(differences, differences, floor), strict=True):
        document = documents[index]
        result[index] = replace(document, advantages=_on_labels(document, advantage), difference=None)
    return result


class GroupSizeError(TruestepError):
    """Groups of a size that the configuration does not mean."""


def check_group_sizes(members: Sequence[int], group_size: int | None) -> None:
    """Refuse a group size that not one of several groups has: it is a mistake, and every baseline would be wrong."""
    if group_size is None or len(members) < 2 or any(count % group_size == 0 for count in members):
        return
    sizes = Counter(members).most_common(3)
    found = ", ".join(f"{groups:,} of {count:,}" for count, groups in sizes)
    more = f" and {len(set(members)) - len(sizes)} more sizes" if len(set(members)) > len(sizes) else ""
    raise GroupSizeError(
        f"data.group_size: {group_size} fits none of the {len(members):,} groups: there are {found} records{more}. "
        f"Write data.group_size: {sizes[0][0]}, or leave it out: a file's groups then end where the data ends"
    )


def assign_advantages(
    items: Iterable[Rollout | Rejected], *, rule: AdvantageRule | str, group_size: int | None
) -> list[Rollout]:
    """List the rollouts in the order they came, with advantages from their groups; rejected records are left out.

    A group closes at `group_size` members, and a later record of the same `group_id` opens a new one; otherwise it
    closes at the end. Every record with a readable `group_id` is a member: a rejected one, and one that carries its
    own advantage, fill a place and are no part of the baseline. Rollouts without what the rule needs (a reward and a
    group) stay as they are, and with the rule `none` all do.
    """
    rule = as_rule(rule)
    rollouts: list[Rollout] = []
    open_groups: dict[str, _Group] = {}
    for item in items:
        if isinstance(item, Rollout):
            rollouts.append(item)
        if not rule.from_rewards or item.group_id is None:
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


def _close(group: _Group, rollouts: list[Rollout], rule: AdvantageRule) -> None:
    scored = with_group_advantages([rollouts[index] for index in group.scored], rule)
    for index, rollout in zip(group.scored, scored, strict=True):
        rollouts[index] = rollout
