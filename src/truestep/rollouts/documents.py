"""The lossless conversion of a document to a line of JSON, or to bytes, and back."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from truestep.rollouts import fields
from truestep.rollouts.rows import decode, encode
from truestep.rollouts.turns import turn_lines
from truestep.text import printable
from truestep.types import PLACES, DocumentScore, Rollout, Turn

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
    if isinstance(value, tuple):
        return turn_lines(value) if value and isinstance(value[0], Turn) else list(value)
    return dict(value) if isinstance(value, dict | Mapping) else value  # dict first: Mapping takes longer


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


def record_lines(document: Rollout, score: DocumentScore | None = None) -> list[dict[str, Any]]:
    """Return a document as records of a rollout file, one for each sequence. `score` has the policy's log-probs and
    entropies of the document's labels; they are added to the records as `policy_logprobs` and `entropy`."""
    lines, done = [], 0
    for sequence in document.sequences:
        line: dict[str, Any] = {"id": sequence.id}
        if document.starts:
            line |= {"document_id": document.id, "sequences": len(document.starts)}
        for field in (*fields.TABLE, *(fields.Field(name, "label", None) for name in sequence.fields)):
            value = sequence.value(field.name) if field.source == "record" and field.name not in line else None
            if value is None or field.name in ("id", "num_sequences", "document_id"):
                continue
            if isinstance(value, np.ndarray):
                whole = field.level == "label"
                value = encode(value) if value.ndim > 1 else (value[sequence.loss_mask] if whole else value).tolist()
            if value is not None and value != () and value != {}:
                line[field.in_record] = written(value)
        line["loss_mask"] = sequence.loss_mask.astype(int).tolist()
        line |= {name: value.item() for name, value in sequence.document_fields.items()}
        if score is not None:
            span = slice(done, done + sequence.num_labels)
            line |= {"policy_logprobs": score.logprobs[span].tolist(), "entropy": score.entropy[span].tolist()}
        done += sequence.num_labels
        lines.append(line)
    return lines


def document_bytes(document: Rollout) -> bytes:
    """Return the length of the document's JSON, the JSON, and its arrays. Arrays of labels have a value per label."""
    ids, mask = document.input_ids, document.loss_mask
    stored = {"input_ids": ids.astype(np.int32) if ids.max() < 2**31 else ids, "loss_mask": mask}
    for name in arrays():
        if name not in stored and (values := getattr(document, name)) is not None:
            stored[name] = at_labels(values, mask)
    names = [item.name for item in dataclasses.fields(document) if item.name not in (*arrays(), *PLACES)]
    line = {name: written(getattr(document, name)) for name in names} | others_of(document)
    line["arrays"] = {name: [array.dtype.str, len(array)] for name, array in stored.items()}
    head = json.dumps(line).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in stored.values())])


def read_document_bytes(content: bytes, load: Callable[[bytes], Any] = json.loads) -> Rollout:
    """Read a document that `document_bytes` wrote. Raises ValueError for arrays that do not fit. Content that
    `document_bytes` did not write may raise other errors. `load` reads the JSON."""
    end = 8 + int.from_bytes(content[:8], "little")
    line = load(content[8:end])
    found: dict[str, Any] = dict.fromkeys(arrays())
    for name, (kind, count) in line.pop("arrays").items():
        found[name] = _array(content, end, name, kind, count)
        end += found[name].nbytes
    mask = found["loss_mask"] = found["loss_mask"].view(np.uint8) != 0
    if len(found["input_ids"]) != len(mask):
        raise ValueError(f"it has {len(found['input_ids']):,} tokens and a mask of {len(mask):,}")
    for name, values in found.items():
        if name not in ("input_ids", "loss_mask") and values is not None:
            found[name] = np.zeros(len(mask), values.dtype)
            found[name][mask] = values
    found["input_ids"] = found["input_ids"].astype(np.int64)
    return Rollout(**(line | found | read_others(line) | read_tuples(line)))


def _array(content: bytes, start: int, name: str, kind: str, count: int) -> np.ndarray:
    """Return a copy of one of a document's arrays. Raise ValueError if it has another kind of numbers than its
    attribute, or too few."""
    dtype, wanted = np.dtype(kind), np.dtype(arrays()[name])
    if dtype.kind != wanted.kind or dtype.itemsize > 8:
        raise ValueError(f"its {name} are of {printable(kind, 40)}: expected {wanted}")
    if type(count) is not int or not 0 <= count * dtype.itemsize <= len(content) - start:
        raise ValueError(f"it has fewer bytes than {name} of {printable(count, 40)} values take")
    return np.frombuffer(content, dtype, count, start).copy()


def at_labels(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the values at labels, or only the first value if all are identical bit for bit."""
    on_labels: np.ndarray = values[mask]
    bits = on_labels.view(f"u{on_labels.itemsize}")
    return on_labels[:1] if len(bits) > 1 and (bits == bits[0]).all() else on_labels
