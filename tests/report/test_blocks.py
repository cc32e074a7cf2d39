"""Lines that are read many at a time: the same numbers as one line at a time gives, whatever the lines hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from truestep.files import Line, scan_lines
from truestep.report import blocks
from truestep.report.blocks import Block, scan_blocks
from truestep.report.runs import Run, _one_per_step
from truestep.report.tables import Table


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", 200)
    monkeypatch.setattr(blocks, "_SHORTEST", 0)


def contents(table: Table) -> tuple[Any, ...]:
    """All that a report takes from a table, with the bits of its numbers."""
    columns = {}
    for name in table.names:
        places, values = table.column(name)
        columns[name] = (places.tolist(), (values + 0.0).tobytes())  # -0.0 and 0.0 are one number
    return table.steps.tolist(), columns, table.names, table.repeated, table.left_out


def read_both_ways(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    found = []
    for scan in (scan_blocks, lambda path: scan_lines(path, lenient=True)):
        with monkeypatch.context() as patched:
            patched.setattr("truestep.report.runs.scan_blocks", scan)
            run = Run("run", path.parent)
            table = _one_per_step(run, path.name, "")
            found.append((contents(table), run.problems))
    return found[0], found[1]


numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, 1, -0.0, 5e-324, 1e300, 1.1e300, -1e301, 10**400, 2**53 + 1, 2**63, 2**64, None, True])
)
odd_values = numbers | st.sampled_from(["text", "null", [1], [], {}, {"a": {"b": [1]}}, "2020-01-01", "\ud800", "}\n{"])
names = st.sampled_from(["loss", "reward", "step", "null", "ä", "a b", '"', "{", "["])
plain = st.fixed_dictionaries({"step": st.integers(0, 30), "loss": numbers, "reward": numbers})
odd = st.dictionaries(names, odd_values, max_size=4)
damage = st.sampled_from(
    [
        b"",
        b" ",
        b"{",
        b"}",
        b"[1]",
        b"3",
        b"null",
        b'{"step": 1, "step": 2}',
        b'{"step": 1}{"step": 2}',
        b'{"step": 1} {"step": 2}',
        b'{"step": 01}',
        b'{"step": 1e400}',
        b'{"step": 1, "loss": 1e400}',
        b'{"step": 1, "loss": ' + b"9" * 5000 + b"}",
        b'{"step": 1, "loss": NaN}',
        b'{"step": 1, "loss": -Infinity}',
        b'{"step": 1, "loss": 1.}',
        b'{"step": 1, "loss": 2,}',
        b'{"step": 1, "l\xff": 2}',
        b'\xef\xbb\xbf{"step": 1}',
        b'{"step": 1}\x00',
        b'{"step": 1}\r',
        b' {"step": 1}',
        b'/* */ {"step": 1}',
        b'{"step": 1, "\\u006coss": 7}',
        b'{"step": 1, "a": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"step": 1, "a": "' + b"x" * 500 + b'"}',
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(plain, max_size=12).map(lambda lines: [json.dumps(line).encode() for line in lines])
        | st.lists(odd.map(json.dumps).map(str.encode) | damage, max_size=2),
        max_size=6,
    ),
    st.sampled_from([b"", b'{"step": 9, "loss": 1}', b'{"step": 9']),
)
def test_blocks_hold_what_lines_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[list[bytes]], end: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line + b"\n" for lines in groups for line in lines) + end)
    in_blocks, by_line = read_both_ways(path, monkeypatch)
    assert in_blocks == by_line


def test_plain_lines_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": math.pi * step, "own": None if step % 3 else 1, "flag": True} for step in range(99)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(scan_blocks(path))
    assert all(isinstance(block, Block) for block in found)
    assert len(found) > 20
    losses = np.concatenate([block.columns["loss"] for block in found if isinstance(block, Block)])
    assert losses.tolist() == [math.pi * step for step in range(99)]
    in_blocks, by_line = read_both_ways(path, monkeypatch)
    assert in_blocks == by_line


def test_damage_between_blocks_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    plain_lines = [json.dumps({"step": step, "loss": 0.5}).encode() + b"\n" for step in range(100)]
    path.write_bytes(b"".join([*plain_lines[:50], b"{broken\n", *plain_lines[50:]]))
    found = list(scan_blocks(path))
    (damaged,) = [line for line in found if isinstance(line, Line) and line.value is None]
    assert (damaged.number, damaged.start) == (51, sum(map(len, plain_lines[:50])))
    assert sum(len(part) if isinstance(part, Block) else part.value is not None for part in found) == 100
    assert any(isinstance(part, Block) for part in found)


def test_one_bad_step_of_many_stays_in_sight(tmp_path: Path) -> None:
    """A single spike, and a single value that is none, among lines that are read in blocks and thinned."""
    path = tmp_path / "metrics.jsonl"
    values: dict[int, float | None] = {1717: 1e6, 3131: None}
    lines = [{"step": step, "documents_seen": step, "loss": values.get(step, 0.5)} for step in range(5000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run("run", tmp_path)
    run.metrics = _one_per_step(run, path.name, "")
    points = run.points("loss")
    drawn = dict(zip(points.thinned.steps.tolist(), points.thinned.values.tolist(), strict=True))
    assert len(drawn) < 1000
    assert drawn[1717] == 1e6
    assert math.isnan(drawn[3131])
    assert points.gaps.tolist() == [3131]
