"""Rollout records as documents: docs/contract.md, section 3."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from truestep.tools.verify.oracle.advantages import Record, documents_of, label_positions, over_spread, prepare


@dataclass
class Document:
    """The fields of a record that a step needs. Lists are over the document's labels. None: the record has no such
    field."""

    id: str | None
    input_ids: list[int]
    positions: list[int]
    temperature: float
    old_logprobs: list[float] | None
    advantages: list[float] | None
    versions: list[int] | None
    reward: float | None
    reference_logprobs: list[float] | None = None
    unpenalised: list[float] | None = None  # advantages before the divergence from the reference is subtracted
    truncated: bool | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    sampler_logprobs: list[float] | None = None  # set if old_logprobs are recomputed by the trainer
    group_id: str | None = None
    chosen: list[bool] | None = None  # labels chosen by clip_cov or kl_cov; None: neither is used
    fields: dict[str, Any] = field(
        default_factory=dict
    )  # the user's own fields: a list over the labels, or one value for the document
    document_id: str | None = None  # set if the document has several sequences
    turns: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    routes: list[list[list[int]]] | None = None  # experts of the first tokens, in each layer with a router


def read_documents(records: list[Record], data_config: dict[str, Any]) -> list[Document]:
    """Read a step's records. With `prepared` in `data_config`, `prepare` was already applied."""
    if not data_config.get("prepared"):
        records = prepare(records, data_config)
    declared = data_config.get("fields")
    documents = [read_document(record, data_config.get("temperature", 1.0), declared) for record in records]
    wholes = [document[0] for document in documents_of(records)]
    differences = [record["difference"] for record in wholes if "difference" in record]
    for record, document in zip(records, documents, strict=True):
        if "difference" in record:
            advantage = over_spread(record["difference"], differences, data_config.get("advantage_std_floor", 1e-4))
            document.advantages = [advantage] * len(document.positions)
    return documents


def read_document(record: Record, default_temperature: float, declared: dict[str, Any] | None = None) -> Document:
    """Read a record. `declared`: the user's own fields, as in `data.fields`."""
    input_ids = record["input_ids"]
    positions = label_positions(record)
    if 0 in positions:
        raise ValueError(f"{record.get('id')}: position 0 is never a label")

    old_logprobs = on_labels(record.get("logprobs"), positions, len(input_ids))
    if not all(math.isfinite(value) and value <= 0.0 for value in old_logprobs or []):
        raise ValueError(f"{record.get('id')}: a label's log-prob is above 0 or not finite")

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
        document_id=record.get("document_id"),
        turns=record.get("turns") or [],
        metadata=record.get("metadata") or {},
        routes=record.get("routed_experts"),
        rewards={name: value for name, value in (record.get("rewards") or {}).items() if value is not None},
        fields={
            name: _declared(record.get(name), options, positions, len(input_ids))
            for name, options in (declared or {}).items()
        },
    )


def whole_documents(sequences: list[Document]) -> list[list[int]]:
    """List the indices of each document's sequences."""
    wholes: dict[Any, list[int]] = {}
    for place, sequence in enumerate(sequences):
        wholes.setdefault(place if sequence.document_id is None else sequence.document_id, []).append(place)
    return list(wholes.values())


def merged(sequences: list[Document]) -> Document:
    """Concatenate the sequences of a document."""
    if len(sequences) == 1:
        return sequences[0]
    whole = replace(sequences[0], input_ids=[], positions=[], turns=[], metadata={})
    for sequence in sequences:
        shift = len(whole.input_ids)
        whole.positions += [len(whole.input_ids) + place for place in sequence.positions]
        whole.input_ids += sequence.input_ids
        whole.turns += [turn | {"start": turn["start"] + shift, "end": turn["end"] + shift} for turn in sequence.turns]
        whole.metadata = sequence.metadata | whole.metadata
    for name in _LISTS:
        parts = [getattr(sequence, name) for sequence in sequences if sequence.positions]
        known = parts and all(part is not None for part in parts)
        setattr(whole, name, [value for part in parts for value in part] if known else getattr(whole, name))
    return whole


_LISTS = ("old_logprobs", "advantages", "versions", "reference_logprobs", "unpenalised", "sampler_logprobs", "chosen")
_TYPES = {"float32": float, "int64": int, "bool": bool}


def _declared(value: Any, options: dict[str, Any], positions: list[int], length: int) -> Any:
    """Read a user's own field: one value, or a list over labels."""
    kind = _TYPES[options.get("dtype", "float32")]
    value = options.get("default") if value is None else value
    if options["level"] == "document":
        return kind(value)
    return [kind(each) for each in (on_labels(value, positions, length) or [])]


def on_labels(value: Any, positions: list[int], length: int) -> list[Any] | None:
    """Convert a field with one value, or one per token, or one per label, to a list over labels. None: the field is
    absent.

    The length tells the two lists apart: position 0 is never a label, so there are fewer labels than tokens.

    Decision: a list in model_version may have either length, like a list in logprobs.
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
