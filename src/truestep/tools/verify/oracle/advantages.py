"""Advantages from the rewards of groups, and truncated documents: docs/contract.md, section 4."""

import math
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

LABEL_FIELDS = ("logprobs", "advantage", "model_version", "reference_logprobs")  # fields with a value for each label
_SCALES = {"group_normalized": "group", "batch_normalized": "step"}  # rules that include a scale


def prepare(records: Sequence[Record], data: dict[str, Any]) -> list[Record]:
    """Return the records that steps train on, in their order. `data`: the section `data` of the YAML file. If
    `advantages` is a user's function, `function` is that function; it returns an advantage for each document of a
    group.

    Records with a group and a reward get an `advantage`, or a `difference` if it is scaled over the step. Truncated
    documents lose their labels (`mask`) or are left out (`drop`).
    """
    kind = data.get("advantages", "none")
    prepared = [record for document in documents_of([dict(record) for record in records]) for record in document]
    for group in _groups(prepared, data.get("group_size")) if kind != "none" else ():
        _give_advantages(group, kind, data)
    rule = data.get("truncated", "keep")
    if rule == "drop":
        return [record for record in prepared if not record.get("truncated")]
    own = [name for name, options in (data.get("fields") or {}).items() if options["level"] == "label"]
    return [
        _without_labels(record, own) if rule == "mask" and record.get("truncated") else record for record in prepared
    ]


def documents_of(records: Sequence[Record]) -> list[list[Record]]:
    """Join the records of each document. Documents are ordered by their last record."""
    complete: list[list[Record]] = []
    still_open: dict[str, list[Record]] = {}
    for record in records:
        name = record.get("document_id")
        if name is None:
            complete.append([record])
            continue
        still_open.setdefault(name, []).append(record)
        if len(still_open[name]) == record["sequences"]:
            complete.append(still_open.pop(name))
    return complete


def _groups(records: Sequence[Record], group_size: int | None) -> list[list[list[Record]]]:
    """List the documents of each group. A group ends with its last member; a later document with the same group id
    begins a new group. A member with its own advantage counts as a member, but is not part of the baseline."""
    ended: list[list[list[Record]]] = []
    still_open: dict[str, list[list[Record]]] = {}
    for document in documents_of(records):
        name = document[0].get("group_id")
        if name is None:
            continue
        group = still_open.setdefault(name, [])
        group.append(document)
        if len(group) == group_size:
            ended.append(still_open.pop(name))
    return [
        [one for one in group if one[0].get("advantage") is None and one[0].get("reward") is not None]
        for group in [*ended, *still_open.values()]
    ]


def _give_advantages(group: list[list[Record]], kind: str, data: dict[str, Any]) -> None:
    """Set each record's advantage or difference, in place. The overlong penalty is subtracted from its reward."""
    labels = [sum(len(label_positions(record)) for record in document) for document in group]
    for document, count in zip(group, labels, strict=True):
        if (penalty := data.get("overlong_penalty")) is not None:
            beyond = (count - penalty["from"]) / (penalty["to"] - penalty["from"])
            less = penalty["weight"] * min(max(beyond, 0.0), 1.0)
            for record in document:
                record["reward"] -= less
                record["rewards"] = {**(record.get("rewards") or {}), "overlong_penalty": -less}
    if not group:
        return
    rewards = [document[0]["reward"] for document in group]
    function = data.get("function")
    made = differences(rewards, labels, kind) if function is None else list(function(group))
    scale = data.get("advantage_scale") or _SCALES.get(kind)
    for document, given in zip(group, made, strict=True):
        for record, difference in zip(document, _of_records(document, given), strict=True):
            if isinstance(difference, list):
                floor = data.get("advantage_std_floor", 1e-4)
                scaled = [over_spread(value, rewards, floor) for value in difference]
                record["advantage"] = scaled if scale == "group" else difference
            elif scale == "step":
                record["difference"] = difference
            elif scale == "group":
                record["advantage"] = over_spread(difference, rewards, data.get("advantage_std_floor", 1e-4))
            else:
                record["advantage"] = difference


def _of_records(document: list[Record], given: Any) -> list[Any]:
    """Divide a document's advantage among its records: a number is given to each; a list over tokens or labels is
    cut."""
    if not isinstance(given, list):
        return [given] * len(document)
    sizes = [len(record["input_ids"]) for record in document]
    if len(given) != sum(sizes):
        sizes = [len(label_positions(record)) for record in document]
    return [given[sum(sizes[:place]) : sum(sizes[: place + 1])] for place in range(len(document))]


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
    raise ValueError(f"data.advantages: {kind} has no reference in plain loops")


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
