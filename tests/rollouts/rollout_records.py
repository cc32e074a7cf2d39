"""What the tests of rollouts share: records, how they are parsed and loaded, and what makes two rollouts the same."""

import json
import math
import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from truestep.rollouts.files import DataError, Documents, load_documents
from truestep.rollouts.record import BadRecord, Checks, Needs, parse_record
from truestep.rollouts.stored import can_be_stored, load_stored
from truestep.types import Rollout

EVERYTHING = Needs(logprobs=True, advantages=True, advantage_rule="group_normalized")
NOTHING = Needs(logprobs=False, advantages=False, advantage_rule="none")

# Labels at 2 and 3 of five tokens.
GOOD = {
    "input_ids": [5, 6, 7, 8, 9],
    "loss_mask": [0, 0, 1, 1, 0],
    "logprobs": [0, -0.1, -0.5, -0.25, -7],
    "advantage": 0.5,
    "reward": 1.5,
    "group_id": "g",
    "temperature": 0.7,
    "model_version": 12,
    "truncated": True,
    "rewards": {"format": 0.5, "answer": 1},
    "id": "a",
    "metadata": {"k": [1, None]},
}
MISSING = object()


def parse(record, needs=EVERYTHING, vocabulary_size=100, max_tokens=10, default_temperature=1.0):
    return parse_record(record, "file.jsonl:3", Checks(needs, vocabulary_size, default_temperature, max_tokens))


def changed(**fields):
    return {name: value for name, value in (GOOD | fields).items() if value is not MISSING}


def reason(record, **options):
    with pytest.raises(BadRecord) as caught:
        parse(record, **options)
    return caught.value.reason


POISON = [math.nan, math.inf, -math.inf, 1e30, -1e30, None, 10**400, "x", [1], {}, True]


def same(left: Rollout, right: Rollout) -> bool:
    """Bit for bit, -0.0 and the types of the arrays included."""
    for name in ("input_ids", "loss_mask", "logprobs", "advantages", "model_version", "reference_logprobs"):
        first, second = getattr(left, name), getattr(right, name)
        if (first is None) != (second is None):
            return False
        if first is not None and (first.dtype != second.dtype or first.tobytes() != second.tobytes()):
            return False
    names = ("id", "reward", "group_id", "temperature", "metadata", "truncated", "rewards")
    return all(getattr(left, name) == getattr(right, name) for name in names)


RULE = "group_mean"
NEEDS = Needs(logprobs=True, advantages=True, advantage_rule=RULE)
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float64()),
        "advantage": pa.float64(),
        "reward": pa.float64(),
        "group_id": pa.string(),
        "temperature": pa.float64(),
        "model_version": pa.list_(pa.int64()),
        "id": pa.string(),
        "metadata": pa.struct({"k": pa.int64(), "text": pa.string()}),
    }
)


def record(id=None, reward=None, group_id="g", **fields):
    base = {"input_ids": [1, 2, 3], "loss_mask": [False, True, True], "logprobs": [-0.5, -0.25], "group_id": group_id}
    return base | ({} if id is None else {"id": id}) | ({} if reward is None else {"reward": reward}) | fields


def write(path: Path, *lines) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def load(*paths, **options):
    """Load the files in memory and, where they may be stored, by way of a file, which must not differ in anything."""
    defaults = {"needs": NEEDS, "vocabulary_size": 100, "max_tokens": 16}
    checks = Checks(**(defaults | options))
    if not can_be_stored(checks):
        return load_documents(list(paths), checks)
    with tempfile.TemporaryDirectory() as cache:
        try:
            documents = load_documents(list(paths), checks)
        except DataError as error:
            with pytest.raises(DataError, match=f"^{re.escape(str(error))}$"):
                load_stored(list(paths), checks, Path(cache))
            raise
        assert_same(load_stored(list(paths), checks, Path(cache)), documents)
    return documents


def assert_same(left: Documents, right: Documents) -> None:
    assert left.rejected == right.rejected
    assert len(left.rollouts) == len(right.rollouts)
    for first, second in zip(left.rollouts, right.rollouts, strict=True):
        assert same(first, second), (first, second)


def advantages(documents):
    return {rollout.id: float(rollout.advantages[1]) for rollout in documents.rollouts}


def reasons(documents):
    return [(item.line, item.reason) for item in documents.rejected]
