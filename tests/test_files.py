"""Files that are whole or absent, lines that keep every bit."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.files.whole import append_json_line, json_line, read_json_lines, write_json_lines, write_whole


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_failure_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, before: bytes | None
) -> None:
    path = tmp_path / "folder" / "file"
    if before is not None:
        write_whole(path, before)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(OSError, match="no space left"):
            write_whole(path, b"new")
    assert (path.read_bytes() if path.exists() else None) == before
    assert list(path.parent.iterdir()) == ([] if before is None else [path]), "nothing half-written stays"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_content_is_synced_before_the_name_points_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("rename"), replace(*paths)))
    write_whole(tmp_path / "file", b"content")
    assert order == ["sync", "rename", "sync"]


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LINES = st.lists(st.dictionaries(st.text(max_size=5), st.text() | st.integers() | FLOATS | st.none()), max_size=5)


@settings(max_examples=60, deadline=None)
@given(LINES)
def test_lines_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, lines: list[dict]) -> None:
    path = tmp_path_factory.mktemp("lines") / "file.jsonl"
    write_json_lines(path, lines)
    for line in lines:
        append_json_line(path, line)
    assert [json.dumps(line) for line in read_json_lines(path)] == [json.dumps(line) for line in lines * 2]


def test_float32_survives() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.array([-0.0, 1e-45], np.float32)])
    read = np.array(json.loads(json_line({"values": values.tolist()}))["values"], dtype=np.float32)
    assert read.tobytes() == values.tobytes()
    line = json_line({"value": math.nan, "list": [math.inf, 1.5, {"inner": -math.inf}]})
    assert json.loads(line) == {"value": None, "list": [None, 1.5, {"inner": None}]}, "JSON has no NaN and no infinity"


def test_text_that_is_no_unicode(tmp_path: Path) -> None:
    r"""`"\ud800"` is a line of JSON that Python reads: half of a surrogate pair, which UTF-8 cannot hold."""
    metadata = json.loads(r'{"text": "a\ud800b", "line": "\u2028\u0085\n"}')
    write_json_lines(tmp_path / "written.jsonl", [metadata])
    append_json_line(tmp_path / "appended.jsonl", metadata)
    for name in ("written.jsonl", "appended.jsonl"):
        assert read_json_lines(tmp_path / name) == [metadata]


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    assert read_json_lines(path) == []
    lines = [{"step": 1, "text": "é"}, {"step": 2}, {"step": 3}]
    content = "".join(map(json_line, lines)).encode()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        assert read_json_lines(path) == lines[: content[:length].count(b"\n")]
