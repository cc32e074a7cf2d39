"""The conversion of a document to a line of JSON and back, every bit kept."""

import dataclasses
from typing import Any

import numpy as np

from truestep.types import Rollout

# float32 goes through Python's float64 and back unchanged.
ARRAYS: dict[str, type] = {
    "input_ids": np.int64,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "advantages": np.float32,
    "model_version": np.int64,
    "reference_logprobs": np.float32,
    "recomputed_logprobs": np.float32,
    "chosen": np.uint8,
}


def document_line(document: Rollout) -> dict[str, Any]:
    line = {item.name: getattr(document, item.name) for item in dataclasses.fields(document)}
    for name in ARRAYS:
        line[name] = None if line[name] is None else line[name].tolist()
    return line | {"metadata": dict(document.metadata), "rewards": dict(document.rewards)}


def read_document(line: dict[str, Any]) -> Rollout:
    arrays: dict[str, Any] = {
        name: None if line.get(name) is None else np.array(line[name], dtype=kind) for name, kind in ARRAYS.items()
    }
    return Rollout(**(line | arrays))
