"""Dumps with texts but without tokens: verl's `trainer.rollout_data_dir` and TRL's completions tables."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from truestep.tools.audit.formats.arrays import number, score, text, whole
from truestep.tools.audit.samples import Sample


def fits_verl(record: Mapping[str, Any]) -> bool:
    return {"input", "output", "score"} <= set(record)


def samples_of_verl(record: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    answer = record.get("gts")
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    yield Sample(
        file,
        line,
        reward=score(record["score"]),
        step=whole(record.get("step")),
        prompt=text(record["input"]),
        completion=text(record["output"]),
        answer=text(answer),
    )


_NOT_REWARDS = {"step", "prompt", "completion", "advantage", "images"}


def fits_trl(record: Mapping[str, Any]) -> bool:
    return {"step", "prompt", "completion", "advantage"} <= set(record)


def samples_of_trl(record: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    """Read a row. Its numeric columns are rewards by function. TRL sums them; their weights are assumed to be 1."""
    rewards = {name: value for name, value in record.items() if name not in _NOT_REWARDS}
    parts = {name: found for name, value in rewards.items() if (found := number(value)) is not None}
    advantage = score(record["advantage"])
    yield Sample(
        file,
        line,
        advantages=None if advantage is None else np.array([advantage]),
        reward=sum(value for value in parts.values() if value == value) if parts else None,
        parts=parts,
        step=whole(record["step"]),
        prompt=text(record["prompt"]),
        completion=text(record["completion"]),
        answer=text(rewards.get("answer", rewards.get("solution"))),
    )
