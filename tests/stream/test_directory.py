"""Lines of files in a watched directory: each given once, none before it is whole, in whatever way files come."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from small_runs import read_lines
from truestep.rollouts.source import SourceError
from truestep.rollouts.stream.directory import DirectoryTransport
from truestep.rollouts.stream.transport import TransportError


def put(directory: Path, name: str, text: str) -> None:
    """As a sender should: written beside, then renamed."""
    beside = directory / f".{name}.partial"
    beside.write_text(text, encoding="utf-8")
    beside.rename(directory / name)


def payloads(reader: DirectoryTransport, count: int = 100, seconds: float = 0) -> list[str]:
    return [message.payload.decode().rstrip("\n") for message in reader.fetch(count, seconds) if not message.blank]


def restored(directory: Path, state: dict[str, Any]) -> DirectoryTransport:
    again = DirectoryTransport(directory)
    again.restore(json.loads(json.dumps(state)))
    return again


@pytest.fixture
def reader(tmp_path: Path) -> DirectoryTransport:
    return DirectoryTransport(tmp_path)


def test_files_in_the_order_of_their_names_and_lines_in_theirs(tmp_path: Path, reader: DirectoryTransport) -> None:
    put(tmp_path, "b.jsonl", "3\n4\n")
    put(tmp_path, "a.jsonl", "\ufeff1\n\n2\n")
    assert payloads(reader, 3) == ["1", "2", "3"]
    put(tmp_path, "c.jsonl", "5\n")
    messages = reader.fetch(100, 0)
    assert [(message.where, message.file, message.line) for message in messages] == [
        ("b.jsonl:2", str(tmp_path / "b.jsonl"), 2),
        ("c.jsonl:1", str(tmp_path / "c.jsonl"), 1),
    ]
    assert payloads(reader) == []


def test_what_is_no_file_of_records_is_left_alone(tmp_path: Path, reader: DirectoryTransport) -> None:
    for name in (".a.jsonl", "a.jsonl.tmp", "a.json", "events.jsonl", "README"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / "directory.jsonl").mkdir()
    (tmp_path / "nowhere.jsonl").symlink_to(tmp_path / "nothing")
    assert payloads(reader) == []
    assert reader.hint() == "files are read whose names end in .jsonl"


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path, reader: DirectoryTransport) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        for text, expected in [("1", []), ("2", []), ("3\n4", ["123"]), ("\n", ["4"]), ("5\n6\n", ["5", "6"])]:
            file.write(text)
            file.flush()
            if text == "2":
                payloads(reader)
                assert reader.hint() == "the last line of a.jsonl has no end: it counts as still being written"
            assert payloads(reader) == expected


def test_a_last_line_without_an_end_is_read_when_all_has_ended(tmp_path: Path, reader: DirectoryTransport) -> None:
    put(tmp_path, "a.jsonl", "1\n2")
    assert payloads(reader) == ["1"]
    (tmp_path / "END").touch()
    assert payloads(reader) == ["2"]
    assert not reader.ended
    assert payloads(reader) == []
    assert reader.ended


def test_a_sender_is_waited_for(tmp_path: Path, reader: DirectoryTransport) -> None:
    threading.Timer(0.2, put, (tmp_path, "a.jsonl", "1\n")).start()
    assert payloads(reader, seconds=1e6) == ["1"]
    assert payloads(reader, seconds=0.1) == []


def test_a_restart_reads_what_the_checkpoint_does_not_hold(tmp_path: Path, reader: DirectoryTransport) -> None:
    put(tmp_path, "a.jsonl", "1\n2\n3\n")
    put(tmp_path, "b.jsonl", "4\n5\n")
    payloads(reader, 2)
    held = reader.state()
    payloads(reader, 2)
    put(tmp_path, "0.jsonl", "6\n")
    assert payloads(restored(tmp_path, held)) == ["6", "3", "4", "5"]


def test_a_finished_run_goes_on_when_more_is_sent(tmp_path: Path, reader: DirectoryTransport) -> None:
    put(tmp_path, "a.jsonl", "1\n")
    (tmp_path / "END").touch()
    assert [payloads(reader), payloads(reader)] == [["1"], []]
    (tmp_path / "END").unlink()
    put(tmp_path, "b.jsonl", "2\n")
    again = restored(tmp_path, reader.state())
    assert payloads(again) == ["2"]
    assert not again.ended


@pytest.mark.parametrize("text", ["9\n", "7777\n8888\n9999\n", "x"])
def test_a_file_under_a_name_that_was_read_is_refused_once(
    text: str, tmp_path: Path, reader: DirectoryTransport
) -> None:
    put(tmp_path, "a.jsonl", "1\n2\n")
    payloads(reader)
    put(tmp_path, "a.jsonl", text)
    refused = reader.fetch(100, 0)
    assert [(message.file, message.problem) for message in refused] == [
        (str(tmp_path / "a.jsonl"), "the file was replaced after it had been read: each needs a name of its own")
    ]
    assert payloads(reader) == []


def test_files_that_are_done_with_may_be_removed(tmp_path: Path, reader: DirectoryTransport) -> None:
    put(tmp_path, "a.jsonl", "1\n")
    put(tmp_path, "b.jsonl", "2\n3\n")
    payloads(reader, 2)
    reader.acknowledge(reader.state())
    payloads(reader)
    reader.acknowledge(reader.state())
    assert read_lines(tmp_path / "events.jsonl") == [
        {"event": "acknowledged", "files": ["a.jsonl"]},
        {"event": "acknowledged", "files": ["b.jsonl"]},
    ]
    (tmp_path / "a.jsonl").unlink()
    payloads(reader)
    assert list(reader.state()["files"]) == ["b.jsonl"]


def test_an_event_stands_on_a_line_of_its_own(tmp_path: Path, reader: DirectoryTransport) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "cut sho')
    reader.announce({"event": "weights_ready", "step": 3})
    assert (tmp_path / "events.jsonl").read_text() == '{"event": "cut sho\n{"event": "weights_ready", "step": 3}\n'


def test_events_that_cannot_be_written_are_written_later(tmp_path: Path, reader: DirectoryTransport) -> None:
    (tmp_path / "events.jsonl").mkdir()
    reader.announce({"event": "weights_ready", "step": 1})
    (tmp_path / "events.jsonl").rmdir()
    reader.announce({"event": "weights_ready", "step": 2})
    assert [line["step"] for line in read_lines(tmp_path / "events.jsonl")] == [1, 2]


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "sent"
    with pytest.raises(SourceError, match=r"data.source.directory: .*sent is not a directory"):
        DirectoryTransport(directory)
    directory.mkdir()
    reader = DirectoryTransport(directory)
    directory.rmdir()
    with pytest.raises(TransportError, match="cannot be read"):
        payloads(reader)
    reader.acknowledge({"files": {"a.jsonl": [1, 2]}})
    reader.announce({"event": "training_finished"})


def test_a_checkpoint_of_a_stream(tmp_path: Path, reader: DirectoryTransport) -> None:
    with pytest.raises(SourceError, match="made from a stream, not from a watched directory"):
        reader.restore({"stream": "s", "position": None, "ended": False})
