"""The lossless conversion of a document to a line of JSON and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from truestep.rollouts import fields
from truestep.rollouts.rows import decode, encode
from truestep.rollouts.turns import turn_lines
from truestep.types import PLACES, Rollout, Turn

_ATTRIBUTES = {item.name for item in dataclasses.fields(Rollout)}


def arrays() -> dict[str, Any]:
    """Return the array attributes of a rollout with their dtypes: attributes of tokens first, then of labels."""
    of_labels = {field.name: field.dtype for field in fields.of_labels() if field.name in _ATTRIBUTES}
    return {"input_ids": np.int64, "loss_mask": np.bool_, **of_labels}


def others_of(document: Rollout) -> dict[str, dict[str, Any]]:
    """Return the fields that are not attributes of a rollout, encoded for JSON."""
    held: dict[str, Mapping[str, np.ndarray]] = {place: getattr(document, place) for place in PLACES}
    return {place: {name: encode(values) for name, values in found.items()} for place, found in held.items() if found}


def read_others(line: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Decode the fields that `others_of` encoded."""
    return {place: {name: decode(value) for name, value in line[place].items()} for place in PLACES if place in line}


def written(value: Any) -> Any:
    """Return an attribute of a rollout as a JSON value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return turn_lines(value) if value and isinstance(value[0], Turn) else list(value)
    return value


def read_tuples(line: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read the attributes of a rollout that are tuples."""
    read: dict[str, tuple[Any, ...]] = {name: tuple(line[name]) for name in ("starts", "record_ids") if name in line}
    return read | ({"turns": tuple(Turn(**turn) for turn in line["turns"])} if "turns" in line else {})


def document_line(document: Rollout) -> dict[str, Any]:
    line = {item.name: written(getattr(document, item.name)) for item in dataclasses.fields(document)}
    # float32 survives the conversion to Python's float64 and back unchanged.
    for name in arrays():
        line[name] = None if line[name] is None else line[name].tolist()
    return line | {place: {} for place in PLACES} | others_of(document)


def read_document(line: dict[str, Any]) -> Rollout:
    read: dict[str, Any] = {
        name: None if line.get(name) is None else np.array(line[name], dtype=kind) for name, kind in arrays().items()
    }
    return Rollout(**(line | read | read_others(line) | read_tuples(line)))
