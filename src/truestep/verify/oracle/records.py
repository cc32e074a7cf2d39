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


def read_documents(records: list[Record], data_config: dict[str, Any]) -> list[Document]:
    documents = [read_document(record, data_config.get("temperature", 1.0)) for record in records]
    kind = data_config.get("advantages", "none")
    if kind != "none":
        for record, document in zip(records, documents, strict=True):
            # Where a record has both, `advantage` counts.
            if document.advantages is None and document.reward is not None:
                rewards = group_rewards(records, record["group_id"], data_config.get("group_size"))
                advantage = advantage_from_rewards(document.reward, rewards, kind)
                document.advantages = [advantage] * len(document.positions)
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


def group_rewards(records: list[Record], group_id: str, group_size: int | None) -> list[float]:
    """Collect the rewards of a group. Decision: it is all records of the step with its group_id and a reward."""
    group = [record for record in records if record.get("group_id") == group_id]
    rewards = [record["reward"] for record in group if record.get("reward") is not None]
    if group_size is not None and len(rewards) > group_size:
        raise ValueError(f"group {group_id} has {len(rewards)} records, more than group_size {group_size}")
    return rewards


def advantage_from_rewards(reward: float, rewards: list[float], kind: str) -> float:
    """Compute the advantage of one record; `rewards` are those of the whole group, its own among them."""
    count = len(rewards)
    if count == 1:
        return 0.0
    mean = sum(rewards) / count
    if kind == "group_mean":
        return reward - mean
    if kind == "group_normalized":
        variance = sum((other - mean) ** 2 for other in rewards) / (count - 1)
        return (reward - mean) / (math.sqrt(variance) + 1e-4)
    if kind == "leave_one_out":
        return reward - (sum(rewards) - reward) / (count - 1)
    raise ValueError(f"data.advantages: {kind}")
