"""A document to a line and back: nothing changes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from documents import make_document, same_document
from truestep.rollouts.documents import document_line, read_document
from truestep.types import Rollout


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("length", [1, 2, 30])
def test_every_bit_is_kept(length: int, bare: bool) -> None:
    document = make_document("é\U0001f600", length, 7, bare=bare)
    again = read_document(json.loads(json.dumps(document_line(document))))
    assert same_document(again, document)
    assert {item.name for item in dataclasses.fields(Rollout)} == set(document_line(document)), "no field is forgotten"


def test_extreme_values() -> None:
    document = Rollout(
        "x",
        np.array([0, 2**62, 3]),
        np.array([False, True, True]),
        logprobs=np.array([0, -0.0, -3.4e38], dtype=np.float32),
        advantages=np.array([0, 1e-45, np.float32(0.1)], dtype=np.float32),
        reward=0.1 + 0.2,
        temperature=1e-3,
        model_version=np.array([0, 2**62, 1]),
        metadata={"nested": [None, {"k": 1.5}]},
    )
    assert same_document(read_document(json.loads(json.dumps(document_line(document)))), document)
