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
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # as a kill cuts a line off
    write_rejected(tmp_path / "run", [one], append=True)
    assert rejected_lines(path) == [expected, expected]
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


def test_appending_leaves_what_was_there(tmp_path, monkeypatch):
    path = write_rejected(tmp_path, [Rejected("f.jsonl", 1, "bad")])
    before, inode = path.read_bytes(), path.stat().st_ino
    monkeypatch.setattr("truestep.rollouts.rejects.write_whole", None)  # the file is not written anew
    write_rejected(tmp_path, [Rejected("f.jsonl", 2, "worse")], append=True)
    assert path.read_bytes().startswith(before) and path.stat().st_ino == inode
    assert len(rejected_lines(path)) == 2


@pytest.mark.parametrize("torn", [b"{", b'{"file": "' + b"x" * 4096, b"y" * 10000])
@pytest.mark.parametrize("lines", [0, 1, 3])
def test_a_torn_line_of_any_length_is_replaced(tmp_path, torn, lines):
    path = write_rejected(tmp_path, [Rejected("f.jsonl", line, "bad") for line in range(lines)])
    with path.open("ab") as file:
        file.write(torn)
    write_rejected(tmp_path, [Rejected("f.jsonl", 9, "worse")], append=True)
    assert [line["line"] for line in rejected_lines(path)] == [*range(lines), 9]
