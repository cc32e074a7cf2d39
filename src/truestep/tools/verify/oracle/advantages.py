"""Advantages from the rewards of groups, and truncated documents: docs/contract.md, section 4."""

import math
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

LABEL_FIELDS = ("logprobs", "advantage", "model_version", "reference_logprobs")  # fields with a value for each label
_SCALES = {"group_normalized": "group", "batch_normalized": "step"}  # rules that include a scale


def prepare(records: Sequence[Record], data: dict[str, Any]) -> list[Record]:
    """Return the records that steps train on, in their order. `data`: that section of the YAML file; if `advantages` is
    a user's function, it is in `function` and returns a number for each of a group's records.

    Records with a group and a reward get an `advantage`, or a `difference` if it is scaled over the step. Truncated
    documents lose their labels (`mask`) or are left out (`drop`).
    """
    kind = data.get("advantages", "none")
    prepared = [dict(record) for record in records]
    for group in _groups(prepared, data.get("group_size")) if kind != "none" else ():
        _give_advantages(group, kind, data)
    rule = data.get("truncated", "keep")
    if rule == "drop":
        return [record for record in prepared if not record.get("truncated")]
    own = [name for name, options in (data.get("fields") or {}).items() if options["level"] == "label"]
    return [
        _without_labels(record, own) if rule == "mask" and record.get("truncated") else record for record in prepared
    ]


def _groups(records: Sequence[Record], group_size: int | None) -> list[list[Record]]:
    """List the groups. A group ends with `group_size` members; a later record with its id begins a new group. A member
    with its own advantage counts as a member and is not part of the baseline."""
    ended: list[list[Record]] = []
    still_open: dict[str, list[Record]] = {}
    for record in records:
        if record.get("group_id") is None:
            continue
        group = still_open.setdefault(record["group_id"], [])
        group.append(record)
        if len(group) == group_size:
            ended.append(still_open.pop(record["group_id"]))
    return [
        [record for record in group if record.get("advantage") is None and record.get("reward") is not None]
        for group in [*ended, *still_open.values()]
    ]


def _give_advantages(group: list[Record], kind: str, data: dict[str, Any]) -> None:
    """Set each record's advantage or difference, in place. The overlong penalty is subtracted from its reward."""
    for record in group:
        if (penalty := data.get("overlong_penalty")) is not None:
            beyond = (len(label_positions(record)) - penalty["from"]) / (penalty["to"] - penalty["from"])
            less = penalty["weight"] * min(max(beyond, 0.0), 1.0)
            record["reward"] -= less
            record["rewards"] = {**(record.get("rewards") or {}), "overlong_penalty": -less}
    if not group:
        return
    rewards = [record["reward"] for record in group]
    function = data.get("function")
    labels = [len(label_positions(record)) for record in group]
    made = differences(rewards, labels, kind) if function is None else list(function(group))
    scale = data.get("advantage_scale") or _SCALES.get(kind)
    for record, difference in zip(group, made, strict=True):
        if scale == "step":
            record["difference"] = difference
        elif scale == "group":
            record["advantage"] = over_spread(difference, rewards, data.get("advantage_std_floor", 1e-4))
        else:
            record["advantage"] = difference


def differences(rewards: Sequence[float], labels: Sequence[int], kind: str) -> list[float]:
    """Return each reward of a group minus its baseline. `labels`: the number of labels of each document."""
    count, total = len(rewards), math.fsum(rewards)
    if count == 1 or min(rewards) == max(rewards):
        return [0.0] * count
    if kind == "leave_one_out":
        return [reward - (total - reward) / (count - 1) for reward in rewards]
    if kind == "length_weighted" and any(labels):
        weighted = math.fsum(number * reward for number, reward in zip(labels, rewards, strict=True))
        return [reward - weighted / sum(labels) for reward in rewards]
    if kind in ("group_mean", "group_normalized", "batch_normalized", "length_weighted"):
        return [reward - total / count for reward in rewards]
    raise ValueError(f"data.advantages: {kind}")


def over_spread(difference: float, values: Sequence[float], floor: float) -> float:
    """Divide by the sample standard deviation of the values plus the floor. Fewer than two values give 0."""
    if len(values) < 2 or difference == 0:
        return 0.0
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) + floor
    return difference / spread if spread else 0.0


def label_positions(record: Record) -> list[int]:
    if record.get("loss_mask") is not None:
        return [position for position, value in enumerate(record["loss_mask"]) if value == 1]
    return list(range(record["prompt_length"], len(record["input_ids"])))


def _without_labels(record: Record, own: Sequence[str] = ()) -> Record:
    lists = (*LABEL_FIELDS, "prompt_length", *own)
    kept = {name: value for name, value in record.items() if name not in lists}
    advantage = {"advantage": 0.0} if "advantage" in record else {}
    return kept | advantage | {"loss_mask": [0] * len(record["input_ids"])}
