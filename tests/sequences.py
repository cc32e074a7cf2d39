"""Records of documents of several sequences, made of records that are documents of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

_OF_THE_DOCUMENT = ("group_id", "reward", "rewards", "truncated", "temperature")
_OF_LABELS = ("logprobs", "model_version", "reference_logprobs")


def in_documents(records: Sequence[Record], sizes: Sequence[int] = (2, 1, 3)) -> list[Record]:
    """Join neighbours to documents of so many sequences, in turn. What they must agree in is the first one's."""
    joined: list[Record] = []
    start = number = 0
    while start < len(records):
        members = [dict(record) for record in records[start : start + sizes[number % len(sizes)]]]
        joined += _document(members, f"document {number}") if len(members) > 1 else members
        start, number = start + len(members), number + 1
    return joined


def _document(members: list[Record], name: str) -> list[Record]:
    first = dict(members[0])
    for record in members:
        for field in _OF_THE_DOCUMENT:
            record.pop(field, None)
        record |= {field: first[field] for field in _OF_THE_DOCUMENT if field in first}
        record |= {"document_id": name, "sequences": len(members)}
    for field in _OF_LABELS:
        if not all(record.get(field) is not None for record in members):
            for record in members:
                record.pop(field, None)
    given = first.get("advantage")
    for place, record in enumerate(members):
        if not isinstance(given, list):
            record.pop("advantage", None)
            record |= {} if given is None else {"advantage": given}
        elif not isinstance(record.get("advantage"), list):
            record["advantage"] = [0.5 * place + 0.25 * index for index in range(len(record["input_ids"]))]
    return members


def with_turns(record: Record) -> Record:
    """Give a record turns: half of it answered, half written; and facts about its episode."""
    size = len(record["input_ids"])
    half = size // 2
    written = {"start": half, "end": size, "role": "assistant", "reward": 0.25 * half}
    calls = {"add": {"calls": 1 + size % 3}, "(other)": {"calls": size % 2}}
    turn = {"malformed": size % 4, "tools": calls if size % 5 else {}}
    facts = {"ended_by": ("environment", "max_turns", "its own")[size % 3], "tools": ["add", "look"], "by_turn": [turn]}
    turns = [*([{"start": 0, "end": half, "role": "user"}] if half else []), written]
    return record | {"turns": turns, "metadata": facts if size % 7 else {"by_turn": 3}}
