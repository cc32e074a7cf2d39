"""Lines that are read in blocks: whatever is in them, what comes out is what Python's JSON reader makes of each."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollouts.rollout_records import GOOD, same
from truestep.rollouts.files import parse_json, readable
from truestep.rollouts.record import BadRecord, parse_record
from truestep.rollouts.table.convert import NEUTRAL, rollouts_of
from truestep.rollouts.table.lines import _numbers, read_lines
from truestep.types import Rollout

REFERENCE = [-1.5, 0, -0.0, -1e-7, -2.5e30]
VERSIONS = [1, 2, 3, 4, 5]
FULL = GOOD | {"reference_logprobs": REFERENCE, "model_version": VERSIONS, "advantage": [0.1, -3.25]}
COMPACT = {"separators": (",", ":")}


def exact(line: bytes) -> Rollout | None:
    try:
        return parse_record(readable(parse_json(line)), "", NEUTRAL)
    except BadRecord:
        return None


def assert_as_exact(lines: list[bytes]) -> None:
    for line, found in zip(lines, rollouts_of(lines), strict=True):
        expected = exact(line)
        assert (found is None) == (expected is None), line
        assert found is None or expected is None or same(found, expected), line


USUAL = [
    GOOD,
    FULL,
    GOOD | {"logprobs": [math.nan, None, -0.5, -1e-05, math.nan]},
    GOOD | {"loss_mask": [False, False, True, True, False]},
    GOOD | {"input_ids": [0, 10, 2**40, 0, 2**63 - 1], "advantage": [0.5, 1, 1e22, -7.25e-3, 0]},
    GOOD | {"metadata": {"text": 'say "logprobs": [1, 2] \\ and \n', "more": [[1], {"input": [2]}]}},
]


@pytest.mark.parametrize("style", [{}, COMPACT])
def test_usual_lines_are_read_fast(style) -> None:
    lines = [json.dumps(record, **style).encode() for record in USUAL]
    for record in read_lines(lines):
        assert record is not None and isinstance(record["input_ids"], np.ndarray)
    assert_as_exact(lines)
    assert all(rollout is not None for rollout in rollouts_of(lines))


NUMBERS = [
    *b"01 -01 00 .5 -.5 1. 1.e5 -1.E5 +1 0x10 0X1f -0 -0.0 0e5 1e400 -1e400 1e-400 1e 1_0 --1 1e5 1E+5 -1e-5".split(),
    *b"NaN nan Nan -NaN NaNN Infinity -Infinity inf null -null true -false 1true false0 falsetrue".split(),
    *b"9223372036854775808 -9223372036854775808 -4.9e-324 -2.4703282292062327e-324 -1.7976931348623158e308".split(),
    *b'-3.4028235677973366e38 1,,2 1,2 ,1 1, [1] "1" "]" {} 1] ] \xff \xd9\xa1'.split(),
    *(b"", b" 1", b"1 ", b"1 ,2", b"1\t", b"-" + b"9" * 5000, b"-0." + b"7" * 5000),
]
FIELDS = ("input_ids", "loss_mask", "logprobs", "advantage", "model_version", "reference_logprobs")


@pytest.mark.parametrize("number", NUMBERS, ids=range(len(NUMBERS)))
def test_odd_numbers(number: bytes) -> None:
    """In each field, on a label and off it, alone and among other lines."""
    lines = []
    for field in FIELDS:
        for index in range(len(FULL[field])):
            values = [*FULL[field][:index], "HERE", *FULL[field][index + 1 :]]
            for style in ({}, COMPACT):
                lines.append(json.dumps(FULL | {field: values}, **style).encode().replace(b'"HERE"', number))
    assert_as_exact(lines)
    for line in lines:
        assert_as_exact([line])


LINES = [
    b'{"input_ids": [1, 2], "prompt_length": 1, "logprobs": [-1], "logprobs": [-1]}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "logprobs": [-1], "\\u006cogprobs": [-2]}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "metadata": {"logprobs": [-1]}}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "metadata": {"logprobs": [-1]}, "logprobs": [-2]}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "metadata": {"logprobs": [-1]}, "\\u006cogprobs": [-2]}',
    b'{"metadata": {"logprobs": [-1]}, "logprobs": "<a list of numbers>", "input_ids": [1, 2], "prompt_length": 1}',
    b'{"input_ids": "<a list of numbers>", "prompt_length": 1, "logprobs": [-1]}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "id": "<a list of numbers>"}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "metadata": {"x\\"logprobs": [-1]}}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "x\\"logprobs": [-1]}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "\\\\"logprobs": [-1]}',
    b'{"input_ids": [1, 2], "prompt_length": 1, "id": "logprobs": [-1]}',
    b'{"input_ids": [[1], [2]], "prompt_length": 1}',
    b'{"input_ids": [1, 2, "prompt_length": 1}',
    b'{"input_ids": [1, 2], "prompt_length": 1} x',
    b'{"input_ids" :\t[1, 2], "prompt_length": 1}\r\n',
    b'{"input_ids": [1, 2], "prompt_length": 1, "id": "\xff"}',
    b'{"input_ids": [1, 2], "loss_mask": [], "prompt_length": 1, "logprobs": []}',
    b'[{"input_ids": [1, 2], "prompt_length": 1}]',
    b'"input_ids": [1, 2]',
    b'{"input_ids": [1, 2], "prompt_length": 1, "metadata": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b"{}",
]


def test_odd_lines() -> None:
    assert_as_exact(LINES)
    for line in LINES:
        assert_as_exact([line])


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    style = draw(st.sampled_from([{}, COMPACT]))
    line = bytearray(json.dumps(draw(st.sampled_from(USUAL)), **style).encode())
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(line)))
        piece = draw(
            st.sampled_from([*b'0123456789.eE+-,[]{}": \\ntfN\xff', None, b"null", b"true", b"NaN", b"[1, 2]"])
        )
        removed = draw(st.integers(0, 2))
        line[start : start + removed] = b"" if piece is None else bytes([piece]) if isinstance(piece, int) else piece
    return bytes(line)


@settings(max_examples=80, deadline=None)
@given(st.lists(mutated(), min_size=1, max_size=5))
def test_mutated_lines(lines: list[bytes]) -> None:
    assert_as_exact(lines)


TEXTS = st.text("0123456789.eE+-,xNa ", max_size=8) | st.floats().map(repr) | st.integers().map(str)
DECIMALS = st.from_regex(r"\A-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,3})?\Z")


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS | DECIMALS, min_size=1, max_size=4), st.sampled_from([", ", ","]))
@example(["N,"], ", ")
def test_numbers_have_every_bit(texts: list[str], separator: str) -> None:
    text = separator.join(texts)
    for kind, types in ((pa.float64(), (int, float)), (pa.int64(), (int,))):
        numbers = _numbers(text.encode(), separator.encode(), kind)
        if numbers is not None:
            expected = json.loads(f"[{text}]")
            assert {type(value) for value in expected} <= {*types}
            assert numbers.tobytes() == np.array(expected, kind.to_pandas_dtype()).tobytes()
