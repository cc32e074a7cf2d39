"""The conversion of documents to records of a rollout file."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from truestep.rollouts.fields import Field, from_records
from truestep.rollouts.turns import turn_lines
from truestep.types import Rollout

Record = dict[str, Any]


def record_of(document: Rollout, declared: Sequence[Field] = ()) -> Record:
    """Convert a document to a record of a rollout file. `declared`: the user's own fields."""
    record: Record = {
        "id": document.id,
        "input_ids": document.input_ids.tolist(),
        "loss_mask": document.loss_mask.astype(int).tolist(),
        "temperature": document.temperature,
    }
    for field in from_records(declared):
        value = document.value(field.name)
        if isinstance(value, Mapping):
            value = dict(value) or None
        elif isinstance(value, tuple):
            value = turn_lines(value) or None
        if value is not None:
            record[field.in_record] = value.tolist() if isinstance(value, np.ndarray) else value
    return record


def records_of(document: Rollout, declared: Sequence[Field] = ()) -> list[Record]:
    """Convert a document to records of a rollout file, one for each of its sequences."""
    if not document.starts:
        return [record_of(document, declared)]
    joined = {"document_id": document.id, "sequences": len(document.starts)}
    return [record_of(sequence, declared) | joined for sequence in document.sequences]
