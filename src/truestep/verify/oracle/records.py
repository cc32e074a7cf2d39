"""Rollout records, reduced to what a step needs: docs/contract.md, section 3."""

import math
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass
class Document:
    """One record, reduced to what the step needs. Its lists are over the document's labels; None where absent."""

    id: str | None
    input_ids: list[int]
    positions: list[int]
    temperature: float
    old_logprobs: list[float] | None
    advantages: list[float] | None
    versions: list[int] | None
    reward: float | None
    reference_logprobs: list[float] | None = None
    truncated: bool | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    sampler_logprobs: list[float] | None = None  # where old_logprobs are the trainer's own
    group_id: str | None = None
    chosen: list[bool] | None = None  # by clip_cov or kl_cov; None: no label is


def read_documents(records: list[Record], data_config: dict[str, Any]) -> list[Document]:
    documents = [read_document(record, data_config.get("temperature", 1.0)) for record in records]
    kind = data_config.get("advantages", "none")
    scale = data_config.get("advantage_scale") or {"group_normalized": "group", "batch_normalized": "step"}.get(kind)
    floor = data_config.get("advantage_std_floor", 1e-4)
    made: dict[int, float] = {}  # by the document's place in the step
    for index, (record, document) in enumerate(zip(records, documents, strict=True)):
        # Where a record has both, `advantage` counts.
        if kind == "none" or document.advantages is not None or document.reward is None:
            continue
        if kind == "given":  # `verify` gives differences, whose baseline no layout can change
            made[index] = record["metadata"]["difference"]
            continue
        group = group_members(records, documents, record["group_id"], data_config.get("group_size"))
        made[index] = difference_from_rewards(document, group, kind)
        if scale == "group":
            made[index] = over_spread(made[index], [float(member.reward or 0) for member in group], floor)
    differences = list(made.values())
    for index, difference in made.items():
        advantage = over_spread(difference, differences, floor) if scale == "step" else difference
        documents[index].advantages = [advantage] * len(documents[index].positions)
    return documents


def read_document(record: Record, default_temperature: float) -> Document:
    input_ids = record["input_ids"]
    if "loss_mask" in record:
        positions = [position for position, value in enumerate(record["loss_mask"]) if value == 1]
    else:
        positions = list(range(record["prompt_length"], len(input_ids)))
    if 0 in positions:
        raise ValueError(f"{record.get('id')}: position 0 is never a label")

    old_logprobs = on_labels(record.get("logprobs"), positions, len(input_ids))
    if not all(math.isfinite(value) and value <= 0.0 for value in old_logprobs or []):
        raise ValueError(f"{record.get('id')}: a log-prob of a label is not finite or positive")

    temperature = record.get("temperature")
    return Document(
        id=record.get("id"),
        input_ids=input_ids,
        positions=positions,
        temperature=default_temperature if temperature is None else temperature,
        old_logprobs=old_logprobs,
        advantages=on_labels(record.get("advantage"), positions, len(input_ids)),
        versions=on_labels(record.get("model_version"), positions, len(input_ids)),
        reward=record.get("reward"),
        reference_logprobs=on_labels(record.get("reference_logprobs"), positions, len(input_ids)),
        truncated=record.get("truncated"),
        group_id=record.get("group_id"),
        rewards={name: value for name, value in (record.get("rewards") or {}).items() if value is not None},
    )


def on_labels(value: Any, positions: list[int], length: int) -> list[Any] | None:
    """Spread a field that is one value, one per token or one per label over the labels; None where it is absent.

    The two lists cannot be confused: position 0 is no label, so there are fewer labels than tokens.
    Decision: model_version's list has the same two lengths as that of logprobs.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        return [value for _ in positions]
    if len(value) == length:
        return [value[position] for position in positions]
    if len(value) == len(positions):
        return list(value)
    raise ValueError(f"{len(value)} values for {length} tokens and {len(positions)} labels")


def group_members(
    records: list[Record], documents: list[Document], group_id: str, group_size: int | None
) -> list[Document]:
    """Collect a group. Decision: it is all records of the step with its group_id and a reward."""
    group = [
        document
        for record, document in zip(records, documents, strict=True)
        if record.get("group_id") == group_id and document.reward is not None
    ]
    if group_size is not None and len(group) > group_size:
        raise ValueError(f"group {group_id} has {len(group)} records, more than group_size {group_size}")
    return group


def difference_from_rewards(document: Document, group: list[Document], kind: str) -> float:
    """Compute one document's reward less its baseline; `group` is the whole group, the document among them."""
    rewards = [member.reward for member in group if member.reward is not None]
    assert document.reward is not None
    count = len(rewards)
    if count == 1:
        return 0.0
    if kind == "leave_one_out":
        return document.reward - (sum(rewards) - document.reward) / (count - 1)
    if kind == "length_weighted":
        labels = sum(len(member.positions) for member in group)
        weighted = sum(len(member.positions) * (member.reward or 0.0) for member in group)
        return document.reward - weighted / labels
    if kind in ("group_mean", "group_normalized", "batch_normalized"):
        return document.reward - sum(rewards) / count
    raise ValueError(f"data.advantages: {kind}")


def over_spread(difference: float, values: list[float], floor: float) -> float:
    """Divide by the sample's standard deviation of the values, and the floor; so few have no spread, and give 0."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return difference / (math.sqrt(variance) + floor)
