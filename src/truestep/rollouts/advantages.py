"""Advantages computed from the rewards of a group (the rollouts of one prompt), by a baseline and a scale."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
PENALTY = "overlong_penalty"  # key in `Rollout.rewards`

# A user's function: takes a group's documents and returns the advantage of each: a number, or one per token or label.
GroupFunction = Callable[[Sequence[Rollout]], Sequence[float | Sequence[float] | np.ndarray]]


class AdvantageError(TruestepError):
    """An error of a user's advantage function."""


@dataclass(frozen=True)
class OverlongPenalty:
    """A penalty on long completions: 0 up to `start` labels, linear in between, `weight` from `end` labels on."""

    start: int
    end: int
    weight: float

    def of(self, num_labels: int) -> float:
        return self.weight * min(max((num_labels - self.start) / (self.end - self.start), 0.0), 1.0)


@dataclass(frozen=True)
class AdvantageRule:
    """The computation of advantages from rewards."""

    baseline: str  # one of BASELINES, "none" (records carry `advantage`), or a user's package.module:function
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
        """Return the rule named by `data.advantages`. Imports a user's function."""
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
    """Compute a group's advantages in float64 by a built-in rule, before any scaling over the step.

    Groups of one document or of equal rewards get exactly 0. Sums are exact (`fsum`), so the result does not depend on
    the order of the group's members.
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
    if baseline == "leave_one_out":  # equals reward - mean of the other rewards, without cancellation
        return deviations * (count / (count - 1))
    if baseline == "length_weighted":
        if num_labels is None or len(num_labels) != count:
            raise ValueError("length_weighted needs the number of labels of each record, as num_labels")
        labels = np.asarray(num_labels, dtype=np.float64)
        # If no document has labels, the weights are all 0 and nothing is trained.
        return deviations - math.fsum(deviations * labels) / max(labels.sum(), 1.0)
    return deviations


def _scaled(differences: np.ndarray, rewards: np.ndarray, rule: AdvantageRule) -> np.ndarray:
    """Divide by the group's reward standard deviation if the rule's scale is `group`."""
    return differences if rule.scale != "group" else _over_spread(differences, rewards, rule.floor)


def _over_spread(differences: np.ndarray, values: np.ndarray, floor: float) -> np.ndarray:
    """Divide by the sample standard deviation of `values` plus the floor. Fewer than two values give 0."""
    if len(values) < 2:
        return np.zeros(len(differences))
    deviations = values - math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum(deviations**2) / (len(values) - 1)) + floor
    return np.where(differences == 0, 0.0, differences / spread) if spread else np.zeros(len(differences))


def with_group_advantages(group: Sequence[Rollout], rule: AdvantageRule) -> list[Rollout]:
    """Return the documents of one group with advantages; all need a reward.

    If the scale is `step`, each document also keeps its unscaled `difference` until its step is known.
    """
    penalised = [_penalised(rollout, rule.penalty) for rollout in group]
    rewards = np.array([rollout.reward for rollout in penalised], dtype=np.float64)
    if rule.function is None:
        numbers = _differences(rewards, rule.baseline, [rollout.num_labels for rollout in penalised])
        differences = [np.array([number]) for number in numbers]
    else:
        differences = _of_user(penalised, rule) if penalised else []
    return [
        replace(
            rollout,
            advantages=_on_labels(rollout, _scaled(difference, rewards, rule)),
            difference=float(difference[0]) if rule.scale == "step" else None,
        )
        for rollout, difference in zip(penalised, differences, strict=True)
    ]


def _penalised(rollout: Rollout, penalty: OverlongPenalty | None) -> Rollout:
    assert rollout.reward is not None
    if penalty is None:
        return rollout
    less = penalty.of(rollout.num_labels)
    return replace(rollout, reward=rollout.reward - less, rewards={**rollout.rewards, PENALTY: -less})


def _of_user(group: Sequence[Rollout], rule: AdvantageRule) -> list[np.ndarray]:
    """Call a user's function with a group, and return its checked advantages: for each document one number, or one per
    token."""
    assert rule.function is not None
    where = f"data.advantages {rule.baseline!r}: group {printable(group[0].group_id)}"
    try:
        given: Any = rule.function(list(group))
        values = [_plain(value) for value in _plain(given)]
    except (Exception, SystemExit) as error:  # the function is the user's: it can raise anything
        raise AdvantageError(f"{where}: {type(error).__name__}: {printable(error)}") from error
    if len(values) != len(group):
        raise AdvantageError(f"{where}: {len(values)} advantages for {len(group)} records: expected one for each")
    checked = []
    for index, (rollout, value) in enumerate(zip(group, values, strict=True)):
        name = f"{where}: the advantage of record {index} ({printable(rollout.id)})"
        several = isinstance(value, list | tuple)
        if several and rule.scale == "step":
            raise AdvantageError(f"{name} is a list: with data.advantage_scale: step each has one number")
        if several and len(value) not in (rollout.num_tokens, rollout.num_labels):
            raise AdvantageError(
                f"{name} has {len(value)} values: expected {rollout.num_tokens} (one a token) or {rollout.num_labels} "
                "(one a label)"
            )
        numbers = [_plain(number) for number in (value if several else [value])]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST_FLOAT32:
                raise AdvantageError(f"{name} is {describe(number)}: expected a finite number")
        checked.append(
            _at_tokens(rollout, np.array(numbers, dtype=np.float64)) if several else np.array(numbers, float)
        )
    return checked


def _plain(value: Any) -> Any:
    """Convert a tensor, an array or a numpy number to Python values."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value


def _at_tokens(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """Spread values per label over the tokens. Values per token are returned unchanged."""
    if len(values) == rollout.num_tokens:
        return values
    spread = np.zeros(rollout.num_tokens)
    spread[rollout.loss_mask] = values
    return spread


def _on_labels(rollout: Rollout, advantage: np.ndarray | float) -> np.ndarray:
    return np.where(rollout.loss_mask, np.asarray(advantage, np.float32), np.float32(0))


def zero(group: Sequence[Rollout]) -> list[float]:
    """Return advantage 0 for every document, for use as `data.advantages`.

    The training signal is then only the divergence from a reference that is part of the reward.
    """
    return [0.0] * len(group)


def scale_over_step(documents: Sequence[Rollout], floor: float) -> list[Rollout]:
    """Divide the differences of a step's documents by their standard deviation over the step plus the floor.

    Sums are exact, so the result depends neither on the order of documents nor on their ranks.
    """
    scaled = [index for index, document in enumerate(documents) if document.difference is not None]
    differences = np.array([documents[index].difference for index in scaled], dtype=np.float64)
    result = list(documents)
    for index, advantage in zip(scaled, _over_spread(differences, differences, floor), strict=True):
        document = documents[index]
        result[index] = replace(document, advantages=_on_labels(document, advantage), difference=None)
    return result


class GroupSizeError(TruestepError):
    """A `data.group_size` that fits none of the groups."""


def check_group_sizes(members: Sequence[int], group_size: int | None) -> None:
    """Raise `GroupSizeError` if there are several groups and `group_size` divides the size of none of them. Baselines
    would be wrong."""
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
    """Return the rollouts in their order, with advantages from their groups; rejected records are left out.

    A group closes at `group_size` members or at the end; a later record with the same `group_id` opens a new group.
    Every record with a readable `group_id` counts as a member, but rejected records and records that carry an advantage
    are not part of the baseline. Rollouts without a reward or a group are unchanged. With the rule `none`, all are
    unchanged.
    """
    rule, items = as_rule(rule), list(items)
    rollouts = [item for item in items if isinstance(item, Rollout)]
    for scored in groups_of(items, group_size) if rule.from_rewards else ():
        with_advantages = with_group_advantages([rollouts[index] for index in scored], rule)
        for index, rollout in zip(scored, with_advantages, strict=True):
            rollouts[index] = rollout
    return rollouts


class Grouped(Protocol):
    """The attributes that decide to which group a document belongs, and whether its reward is part of the baseline."""

    @property
    def group_id(self) -> str | None: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def advantages(self) -> Any: ...


def groups_of(items: Iterable[Grouped | Rejected], group_size: int | None) -> list[list[int]]:
    """Return for each group the indices, among the documents, of those that share its baseline. `assign_advantages`
    says which documents these are."""
    found: list[list[int]] = []
    open_groups: dict[str, list[int]] = {}  # documents that share the baseline
    members: Counter[str] = Counter()
    number = 0
    for item in items:
        if item.group_id is not None:
            if item.group_id not in open_groups:
                open_groups[item.group_id] = []
                found.append(open_groups[item.group_id])
            members[item.group_id] += 1
            if not isinstance(item, Rejected) and item.advantages is None and item.reward is not None:
                open_groups[item.group_id].append(number)
            if members[item.group_id] == group_size:
                del open_groups[item.group_id], members[item.group_id]
        number += not isinstance(item, Rejected)
    return found
