"""Lines of files in a watched directory: each given once, none before it is whole, in whatever way files come."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from selection import in_tiers
from small_runs import read_lines
from stream.clock import Clock
from truestep.rollouts.source import SourceError
from truestep.rollouts.stream import watched as watched_module
from truestep.rollouts.stream.directory import DirectoryTransport
from truestep.rollouts.stream.transport import TransportError
from truestep.rollouts.stream.watched import Seen


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


def tick(directory: Path) -> None:
    """Wait for the clock of the file system: what is written now has another time than what was written before."""
    beside = directory / ".tick"
    beside.touch()
    before = beside.stat().st_ctime_ns
    while beside.stat().st_ctime_ns == before:
        beside.touch()


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


@pytest.mark.parametrize(
    "text", ["9\n", "8\n9\n", "7777\n8888\n9999\n", "2\n1\n", "7\n8\n9\n1\n2\n"], ids=lambda text: repr(text)
)
@pytest.mark.parametrize("how", ["renamed", "written over", "removed and made again"])
@pytest.mark.parametrize("restart", [False, True], ids=["", "over a restart"])
def test_another_file_under_a_name_that_was_read(text: str, how: str, restart: bool, tmp_path: Path) -> None:
    reader = DirectoryTransport(tmp_path)
    put(tmp_path, "a.jsonl", "1\n2\n")
    payloads(reader)
    tick(tmp_path)
    if how == "renamed":
        put(tmp_path, "a.jsonl", text)
    elif how == "written over":
        (tmp_path / "a.jsonl").write_text(text)
    else:
        (tmp_path / "a.jsonl").unlink()
        (tmp_path / "a.jsonl").write_text(text)
    if restart:
        reader = restored(tmp_path, reader.state())
    messages = reader.fetch(100, 0)
    assert [(message.payload.decode().strip(), message.problem) for message in messages if not message.blank] == [
        (line, None) for line in text.split()
    ]
    assert payloads(reader) == []


def test_a_change_far_before_the_end_is_seen_when_the_file_has_been_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of a large file is changed, and one is appended: at once only the last bytes are compared."""
    clock = Clock()
    monkeypatch.setattr(watched_module, "time", clock)
    reader = DirectoryTransport(tmp_path)
    lines = [f"{number:07}" for number in range(50_000)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert payloads(reader, 10**6) == lines
    lines[100] = "changed"
    path.write_text("\n".join(lines) + "\nappended\n")
    assert payloads(reader, 10**6) == ["appended"]
    clock.sleep(10.0)
    assert payloads(reader, 10**6) == [*lines, "appended"]
    clock.sleep(10.0)
    assert payloads(reader, 10**6) == []


def test_a_write_that_no_time_of_the_file_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes within one tick of the file system's clock leave the same size and times."""
    clock, path = Clock(), tmp_path / "a.jsonl"
    monkeypatch.setattr(watched_module, "time", clock)
    reader = DirectoryTransport(tmp_path)
    seen = Seen(1, 4, 5, 5)
    monkeypatch.setattr(DirectoryTransport, "_measure", lambda self: ({"a.jsonl": seen}, {}))
    path.write_text("1\n2\n")
    assert payloads(reader) == ["1", "2"]
    path.write_text("3\n4\n")
    clock.sleep(10.0)
    assert payloads(reader) == ["3", "4"]


@pytest.mark.parametrize(("more", "expected"), [("\n3\n", ["3"]), ("5\n3\n", ["1", "25", "3"])], ids=["ended", "grown"])
@pytest.mark.parametrize("restart", [False, True], ids=["", "over a restart"])
def test_a_last_line_that_was_read_without_its_end(
    more: str, expected: list[str], restart: bool, tmp_path: Path, reader: DirectoryTransport
) -> None:
    put(tmp_path, "a.jsonl", "1\n2")
    (tmp_path / "END").touch()
    assert payloads(reader) == ["1", "2"]
    (tmp_path / "END").unlink()
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(more)
    assert payloads(restored(tmp_path, reader.state()) if restart else reader) == expected


def test_a_copy_of_the_directory_is_the_same_directory(tmp_path: Path) -> None:
    """As rsync makes one on another machine: other inodes, other times."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    put(first, "a.jsonl", "1\n2\n")
    put(first, "b.jsonl", "3\n4\n")
    reader = DirectoryTransport(first)
    assert payloads(reader, 3) == ["1", "2", "3"]
    shutil.copytree(first, second, copy_function=shutil.copyfile)
    (first / "a.jsonl").touch()
    for directory in (first, second):
        assert payloads(restored(directory, reader.state())) == ["4"]


def test_a_checkpoint_of_an_older_version(tmp_path: Path) -> None:
    """It has lines and bytes alone: a file that is long enough and has a line's end there goes on."""
    put(tmp_path, "a.jsonl", "1\n2\n3\n")
    put(tmp_path, "b.jsonl", "44444\n")
    reader = restored(tmp_path, {"files": {"a.jsonl": [2, 4], "b.jsonl": [2, 4]}})
    assert payloads(reader) == ["3", "44444"]


def test_a_file_that_took_a_name_is_not_called_finished(tmp_path: Path, reader: DirectoryTransport) -> None:
    """A sender removes what is called so."""
    put(tmp_path, "a.jsonl", "1\n")
    payloads(reader)
    held = reader.state()
    put(tmp_path, "a.jsonl", "2\n")
    reader.acknowledge(held)
    restored(tmp_path, held).acknowledge(held)
    assert not (tmp_path / "events.jsonl").exists()
    payloads(reader)
    reader.acknowledge(reader.state())
    put(tmp_path, "a.jsonl", "3\n")
    payloads(reader)
    reader.acknowledge(reader.state())
    assert read_lines(tmp_path / "events.jsonl") == 2 * [{"event": "acknowledged", "files": ["a.jsonl"]}]


def test_a_file_that_took_a_name_is_read_without_a_complaint_after_a_look_at_it(
    tmp_path: Path, reader: DirectoryTransport
) -> None:
    """After a restart, a checkpoint may look at it before it is read. All of the file before it had been read."""
    put(tmp_path, "a.jsonl", "1\n")
    payloads(reader)
    held = reader.state()
    put(tmp_path, "a.jsonl", "2\n")
    again = restored(tmp_path, held)
    again.acknowledge(held)
    assert [(message.payload, message.problem) for message in again.fetch(100, 0)] == [(b"2\n", None)]


@pytest.mark.parametrize("seed", in_tiers(range(200), range(12), range(12, 40)))
def test_any_history_of_files_against_a_simple_model(seed: int, tmp_path: Path) -> None:
    """Files are made, appended to, renamed over, written over, cut, touched and removed, with restarts and copies in
    between. The model: what begins with what was read goes on behind it, and all else is read from its beginning."""
    random = Random(seed)
    directory, number = tmp_path / "0", 0
    directory.mkdir()
    reader = DirectoryTransport(directory)
    read: dict[str, bytes] = {}  # the model's
    for turn in range(25):
        name = random.choice(["a.jsonl", "b.jsonl"])
        path = directory / name
        before = path.read_bytes() if path.exists() else b""
        number += 1
        tick(directory)
        new = b"".join(b"%d\n" % random.choice([number, random.randrange(10)]) for _ in range(random.randrange(1, 4)))
        action = random.choice(["append", "half", "rename", "write", "cut", "touch", "remove", "restart", "copy"])
        if action == "append":
            path.write_bytes(before + new)
        elif action == "half":
            path.write_bytes(before + new[:-1])
        elif action == "rename":
            put(directory, name, random.choice([new, before + new, before[:2] + new]).decode())
        elif action == "write":
            path.write_bytes(new * 3)
        elif action in ("cut", "touch") and path.exists():
            path.write_bytes(before[: len(before) // 2] if action == "cut" else before)
        elif action == "remove":
            path.unlink(missing_ok=True)
        elif action == "copy":
            directory = shutil.copytree(directory, tmp_path / str(turn + 1), copy_function=shutil.copyfile)
        if action in ("restart", "copy"):
            reader = restored(directory, reader.state())
        expected = []
        for name in ("a.jsonl", "b.jsonl"):
            if not (directory / name).exists():
                read.pop(name, None)
                continue
            content = (directory / name).read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            start = len(read.get(name, b"")) if content.startswith(read.get(name, b"")) else 0
            expected += whole[start:].decode().split()
            read[name] = whole
        messages = reader.fetch(1000, 0)
        assert [message.payload.decode().strip() for message in messages if message.payload] == expected, (turn, action)
        place = reader.state()["files"]
        assert {name: size for name, (_, size, _) in place.items()} == {
            name: len(content) for name, content in read.items() if content
        }


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
