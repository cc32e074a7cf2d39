"""Digests of documents as a step trains on them, which the ledger keeps.

A digest is 16 hexadecimal digits: 8 of the tokens and labels, then 8 of all other values that the step uses (log-probs,
advantages, reward, versions, fields). So two digests tell whether tokens or only values differ.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from truestep.rollouts.documents import at_labels, written
from truestep.types import CACHED, PLACES, Rollout

# Metadata are not trained on, and a run's own computations are no data.
_LEFT_OUT = CACHED | {"metadata", "recomputed_logprobs", "chosen", "membership", "input_ids", "loss_mask", *PLACES}
REFERENCE = "reference_logprobs"
_json = json.JSONEncoder(sort_keys=True).encode


def digests_of(documents: Sequence[Rollout], own_reference: bool) -> list[str]:
    """Return each document's digest. With `own_reference`, the trainer computes the reference's log-probs itself, and
    they are left out."""
    return [digest_of(document, own_reference) for document in documents]


def digest_of(document: Rollout, own_reference: bool = False) -> str:
    tokens = hashlib.sha256(np.packbits(document.loss_mask).tobytes())
    tokens.update(document.input_ids.tobytes())
    tokens.update(repr(document.starts).encode())
    values, others = hashlib.sha256(), dict[str, Any]()
    for name, value in fields_of(document):
        if name == REFERENCE and own_reference:
            continue
        if isinstance(value, np.ndarray):
            values.update(f"\n{name} {value.dtype.str} {value.shape}\n".encode())
            values.update(np.ascontiguousarray(value).tobytes())
        else:
            others[name] = written(value)
    values.update(_json(others).encode())
    return tokens.hexdigest()[:8] + values.hexdigest()[:8]


def fields_of(document: Rollout) -> Iterator[tuple[str, Any]]:
    """Yield the values of a document besides its tokens and labels, by name: arrays of labels only at labels."""
    for name, value in vars(document).items():
        if name in _LEFT_OUT or value is None:
            continue
        yield name, at_labels(value, document.loss_mask) if isinstance(value, np.ndarray) else value
    for place in PLACES:
        for name, array in sorted(getattr(document, place).items()):
            yield name, at_labels(array, document.loss_mask) if place == "fields" else array
