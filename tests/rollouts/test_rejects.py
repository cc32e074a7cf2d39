import json
import os

import pytest

from truestep.rollouts.rejects import write_rejected
from truestep.types import Rejected


def rejected_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rejected_records_are_written_and_added_to(tmp_path):
    one, two = Rejected("f.jsonl", 3, "bad 'x'\n\u2028", "a", "g"), Rejected("f\udcff.jsonl", 4, "worse")
    path = write_rejected(tmp_path / "run", [one])
    assert path == tmp_path / "run" / "rejected.jsonl"
    expected = {"file": "f.jsonl", "line": 3, "reason": r"bad 'x'\n\u2028", "id": "a"}
    assert rejected_lines(path) == [expected]
    write_rejected(tmp_path / "run", [two], append=True)
    assert rejected_lines(path) == [expected, {"file": "f\udcff.jsonl", "line": 4, "reason": "worse", "id": None}]
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write_rejected(tmp_path / "run", [one], append=True)
    assert len(rejected_lines(path)) == 3
    write_rejected(tmp_path / "run", [])
    assert path.read_bytes() == b""
    assert os.listdir(path.parent) == ["rejected.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = write_rejected(tmp_path, [Rejected("f.jsonl", 1, "bad")])
    before = path.read_bytes()

    def failing():
        yield Rejected("f.jsonl", 2, "bad")
        raise OSError("disk full")

    for append in (False, True):
        with pytest.raises(OSError, match="disk full"):
            write_rejected(tmp_path, failing(), append=append)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rejected.jsonl"]


def test_a_reader_of_the_old_file_never_sees_half_of_the_new(tmp_path):
    path = write_rejected(tmp_path, [Rejected("f.jsonl", 1, "bad")])
    before = path.read_bytes()
    with path.open("rb") as reader:
        write_rejected(tmp_path, [Rejected("f.jsonl", 2, "worse")], append=True)
        assert reader.read() == before  # replaced, not rewritten in place
    assert len(rejected_lines(path)) == 2
