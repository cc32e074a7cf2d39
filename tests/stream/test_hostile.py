"""Streams that nobody meant well: each fault is a named rejection or one clear error, and the rest is trained on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollouts.rollout_records import record
from small_runs import quiet_trainer, read_lines
from stream.redis_server import RedisServer, needs_redis
from stream.test_source import ids, made, make_source, numbered
from stream.test_train import directory_config, put, tiny_records, trained
from truestep.rollouts.source import SourceError
from truestep.rollouts.stream import directory as directory_module
from truestep.rollouts.stream.directory import DirectoryTransport
from truestep.rollouts.stream.redis import RedisTransport
from truestep.rollouts.stream.source import StreamSource
from truestep.types import Rejected


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while made:
        made.pop()._reading.close()


def line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def good(first: int, last: int) -> bytes:
    return b"".join(line(one) for one in numbered(first, last))


def watching(directory: Path, **options: Any) -> StreamSource:
    return make_source(DirectoryTransport(directory), stall_timeout=60, **options)


def reasons(records: Sequence[Rejected]) -> list[str]:
    return [one.reason for one in records]


NESTED = b"[" * 100_000 + b"]" * 100_000
HOSTILE_LINES = {
    "binary": (bytes(range(1, 10)) + b"\xff\xfe\x00\x80", "not valid UTF-8: byte 10"),
    "zeros": (b"\0" * 5000, "not valid JSON"),
    "deep": (NESTED, "not readable JSON"),
    "deep in a record": (b'{"input_ids": ' + NESTED + b"}", "not readable JSON"),
    "deep metadata": (line(record("x", 1.0))[:-2] + b', "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901, ""),
    "a number of a million digits": (b'{"input_ids": [1' + b"0" * 10**6 + b"]}", "not readable JSON"),
    "not a number": (line(record("x", float("nan"))).strip(), "reward is nan"),
    "an infinite reward": (line(record("x", float("inf"))).strip(), "reward is inf"),
    "a long id": (line(record("x" * 10**6, 1.0)).strip(), "id has 1000000 characters"),
    "escapes in an id": (line(record("x", 1.0, temperature="\x1b[2J")).strip(), "temperature is"),
    "the wrong type": (b'"end"', "the record is 'end'"),
    "nothing of a record": (b"{}", "input_ids is missing"),
    "a key twice": (b'{"id": "a", "id": "b"}', "the key 'id' is given twice"),
    "half a character": (b'{"id": "\\ud800"}', "id is"),
}


@pytest.mark.parametrize("name", list(HOSTILE_LINES))
def test_a_hostile_line_is_a_named_rejection(name: str, tmp_path: Path) -> None:
    content, reason = HOSTILE_LINES[name]
    (tmp_path / "a.jsonl").write_bytes(good(1, 2) + content + b"\n" + good(3, 4))
    (tmp_path / "END").touch()
    source = watching(tmp_path)
    taken = source.take(9, 0)
    got, said = ids(taken.documents), reasons(taken.rejected)
    assert [one for one in got if one != "x"] == ["1", "2", "3", "4"]
    assert len(said) == (0 if "x" in got else 1)
    assert all(one.startswith(reason) and len(one) < 500 and one.isprintable() for one in said), said


def test_one_id_many_times(tmp_path: Path) -> None:
    """What is refused while a source waits is put down as it comes, and not held."""
    (tmp_path / "a.jsonl").write_bytes(line(record("same", 1.0, "g")) * 5001 + good(1, 1))
    (tmp_path / "END").touch()
    source = watching(tmp_path)
    sizes: list[int] = []
    source.put_rejected = lambda rejected: sizes.append(len(rejected))
    taken = source.take(2, 0)
    assert ids(taken.documents) == ["same", "1"]
    assert sizes == [1000] * 5
    assert not taken.rejected


def test_groups_of_other_sizes_than_the_run_was_told(tmp_path: Path) -> None:
    """The sender makes groups of three, and the run waits for two."""
    records = [record(f"{group}{member}", float(member), group) for group in "abcd" for member in range(3)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(map(line, records)))
    source = watching(tmp_path, group_size=2)
    assert ids(source.take(8, 0).documents) == ["a0", "a1", "b0", "b1", "c0", "c1", "d0", "d1"]
    assert source._intake.in_open_groups == (3, 3), "the thirds, which a later group of that name would complete"


class _Growing:
    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)

    def write(self, content: bytes) -> None:
        self._file.write(content)


def test_a_line_without_an_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.files.bounded.RECORD", 1000)
    reader = DirectoryTransport(tmp_path)
    growing = _Growing(tmp_path / "a.jsonl")
    growing.write(good(1, 1))
    assert len(reader.fetch(9, 0)) == 1
    for _ in range(5):
        growing.write(b"x" * 700)
        assert reader.fetch(9, 0) == []
        assert reader.fetch(9, 0) == [], "and is not read again until it has grown"
    growing.write(b"\n" + good(2, 2))
    messages = reader.fetch(9, 0)
    assert [message.problem is None for message in messages] == [False, True]
    assert messages[0].payload == b""
    assert messages[0].problem is not None
    assert messages[0].problem == "the line is not read: it has more than 1,000 bytes"
    again = DirectoryTransport(tmp_path)
    again.restore(reader.state())
    assert again.fetch(9, 0) == []


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "b.jsonl")  # to itself
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").symlink_to(tmp_path / "c.jsonl")
    (tmp_path / "e.jsonl").symlink_to(tmp_path)
    (tmp_path / "f.jsonl").write_bytes(good(1, 2))
    source = watching(tmp_path)
    taken = source.take(2, 0)
    assert ids(taken.documents) == ["1", "2"]
    assert sorted(set(reasons(taken.rejected))) == ["the file cannot be read: Too many levels of symbolic links"]
    assert "b.jsonl cannot be read" in (source._transport.hint() or "")


def test_a_pipe_that_takes_the_name_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Between the look at the directory and the opening."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(OSError, match="no longer a file"):
        directory_module.open_file(tmp_path / "a.jsonl")


def test_a_file_that_cannot_be_read_is_said_once_and_read_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = True
    opened = directory_module.open_file

    def guarded(path: Path) -> Any:
        if path.name == "a.jsonl" and locked:
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr(directory_module, "open_file", guarded)
    (tmp_path / "a.jsonl").write_bytes(good(1, 1))
    (tmp_path / "b.jsonl").write_bytes(good(2, 2))
    reader = DirectoryTransport(tmp_path)
    assert [message.problem for message in reader.fetch(9, 0)] == [None, "the file cannot be read: Permission denied"]
    assert reader.fetch(9, 0) == []
    assert reader.hint() == "a.jsonl cannot be read: Permission denied"
    locked = False
    assert [message.where for message in reader.fetch(9, 0)] == ["a.jsonl:1"]


def cut(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(10)


def replaced(path: Path) -> None:
    path.with_name("beside").write_bytes(good(8, 8))
    path.with_name("beside").rename(path)


@pytest.mark.parametrize(
    ("change", "reason", "read"),
    [
        (cut, "the file was replaced before all of it was read", ["b.jsonl:1"]),
        (replaced, "the file was replaced before all of it was read", ["a.jsonl:1", "b.jsonl:1"]),
        (Path.unlink, "the file was removed before all of it was read", ["b.jsonl:1"]),
    ],
    ids=["cut", "replaced", "removed"],
)
def test_a_file_that_changes_while_it_is_read(
    change: Callable[[Path], Any], reason: str, read: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(good(1, 5))
    reader = DirectoryTransport(tmp_path)
    assert len(reader.fetch(3, 0)) == 3
    change(path)
    (tmp_path / "b.jsonl").write_bytes(good(6, 6))
    messages = reader.fetch(9, 0)
    assert [message.problem for message in messages] == [reason, *[None] * len(read)]
    assert [message.where for message in messages[1:]] == read
    assert reader.fetch(9, 0) == []
    place = DirectoryTransport(tmp_path).state()
    for message in messages:
        reader.advance(place, message.mark)
    assert place["files"].get("b.jsonl") == reader.state()["files"]["b.jsonl"]


NAMES = [
    "\x1b[2Jred.jsonl",
    "line\nbreak.jsonl",
    "half\udcff.jsonl",
    "-rf.jsonl",
    "ü" * 100 + ".jsonl",
    "..jsonl.jsonl",
]


def test_names_with_escapes(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES[:5], start=1):
        record_without_id = {key: value for key, value in record(None, 1.0, f"g{number}").items() if key != "id"}
        (tmp_path / name).write_bytes(line(record_without_id) + b"{\n")
    (tmp_path / "END").touch()
    source = watching(tmp_path)
    taken = source.take(9, 0)
    assert sorted(ids(taken.documents)) == sorted(f"{name}:1" for name in NAMES[:5])
    json.dumps(source.state())
    rejected = taken.rejected
    assert len(rejected) == 5
    assert all(one.reason.isprintable() for one in rejected)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def test_a_run_goes_on_through_all_of_it(model: Path, tmp_path: Path) -> None:
    """And a restart in the middle of it says nothing twice."""
    sent, records = tmp_path / "sent", tiny_records(20)
    put(sent, "a.jsonl", records[:7])
    bad = b"".join(content + b"\n" for content, reason in HOSTILE_LINES.values() if reason and b"\n" not in content)
    (sent / "b.jsonl").write_bytes(bad)
    put(sent, "c.jsonl", [*records[7:], *records[:3]])
    (sent / "loop.jsonl").symlink_to(sent / "loop.jsonl")
    os.mkfifo(sent / "pipe.jsonl")
    (sent / "\x1b[2J.jsonl").write_bytes(b"\xff\n")
    (sent / "END").touch()
    for steps in (1, 2, None):
        quiet_trainer(directory_config(model, sent, tmp_path / "run", schedule={"steps": steps})).run()
    assert trained(tmp_path / "run") == [one["id"] for one in records]
    rejected = read_lines(tmp_path / "run" / "rejected.jsonl")
    lines = [(one["file"], one["line"]) for one in rejected if not one["file"].endswith("loop.jsonl")]
    assert len(lines) == len(set(lines)) == bad.count(b"\n") + 3 + 1
    assert sum(one["file"].endswith("loop.jsonl") for one in rejected) >= 1


class Garbling:
    """In front of a server: the answer to each command in which `instead_of` stands is `answer`, for so many times."""

    def __init__(self, server: RedisServer, answer: bytes, times: int = 2, instead_of: bytes = b"XREADGROUP"):
        self._server, self._answer, self.left, self._instead_of = server, answer, times, instead_of
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._server.port)) as server:
            answers = threading.Thread(target=self._pass_answers, args=(server, client), daemon=True)
            answers.start()
            while command := client.recv(65536):
                if self._instead_of in command and self.left > 0:
                    self.left -= 1
                    client.sendall(self._answer)
                    break
                server.sendall(command)
            for end in (server, client):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while answer := server.recv(65536):
                client.sendall(answer)

    def close(self) -> None:
        self._listener.close()


GARBAGE = {
    "nothing": b"",
    "words": b"this is no redis\r\n",
    "a web server": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "zeros": b"\0" * 1000,
    "an error with escapes": b"-ERR \x1b[2J\x07 boom\r\n",
    "a status": b"+OK\r\n",
    "a number": b":5\r\n",
    "a huge length": b"$99999999999999\r\nabc",
    "a negative length": b"*-7\r\n",
    "half an answer": b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$3\r\n1-",
    "other shapes": b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n:7\r\n",
    "an id that is none": b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$4\r\nabcd\r\n*2\r\n$6\r\nrecord\r\n$2\r\n{}\r\n",
    "an id that is no text": b"*1\r\n*2\r\n$1\r\ns\r\n*1\r\n*2\r\n$2\r\n\xff\xfe\r\n*2\r\n$6\r\nrecord\r\n$2\r\n{}\r\n",
    "nested without end": b"*1\r\n" * 5000,
}


@needs_redis
@pytest.mark.parametrize("name", list(GARBAGE))
def test_a_server_that_answers_garbage_and_recovers(name: str, redis_server: RedisServer) -> None:
    proxy = Garbling(redis_server, GARBAGE[name])
    redis_server.send("s", numbered(1, 6))
    redis_server.end("s")
    transport = RedisTransport(url=proxy.url, stream="s", group="truestep", consumer="trainer")
    source = make_source(transport, stall_timeout=60)
    taken = source.take(9, 0)
    assert ids(taken.documents) == ["1", "2", "3", "4", "5", "6"]
    assert proxy.left < 2
    assert reasons(taken.rejected) == []
    source.close(True)
    proxy.close()


@needs_redis
def test_a_server_that_only_ever_answers_garbage(redis_server: RedisServer) -> None:
    proxy = Garbling(redis_server, GARBAGE["an error with escapes"], times=10**6)
    transport = RedisTransport(url=proxy.url, stream="s", group="truestep", consumer="trainer")
    source = make_source(transport, stall_timeout=5.0)
    with pytest.raises(SourceError, match=r"gave no document for 5 s .* cannot be read: .*boom") as caught:
        source.peek(1)
    assert str(caught.value).isprintable()
    proxy.close()
    at_start = Garbling(redis_server, GARBAGE["zeros"], times=10**6, instead_of=b"TYPE")
    with pytest.raises(SourceError, match=r"data\.source\.url: redis at .* cannot be used"):
        RedisTransport(url=at_start.url, stream="s", group="truestep", consumer="trainer")
    at_start.close()


def test_a_server_that_drips_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No read of the connection ever times out, and the run ends all the same, at its own time."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            client.recv(65536)
            client.sendall(b"$100000\r\n")
            while not stop.wait(0.05):
                client.sendall(b"x")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    monkeypatch.setattr("truestep.rollouts.stream.redis._PATIENCE", 0.5)
    with pytest.raises(SourceError, match=r"cannot be used: no whole answer came within 0\.5 s"):
        RedisTransport(url=url, stream="s", group="truestep", consumer="trainer")
    monkeypatch.setattr(RedisTransport, "_check", lambda self: None)  # it drips once the run has begun
    transport = RedisTransport(url=url, stream="s", group="truestep", consumer="trainer")
    source = make_source(transport, stall_timeout=5.0)
    with pytest.raises(SourceError, match=r"gave no document for 5 s .*no whole answer came within"):
        source.peek(1)
    source._reading.close()
    assert source._reading._thread is not None
    assert not source._reading._thread.is_alive()
    stop.set()
    listener.close()


@needs_redis
def test_hostile_entries(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.files.bounded.RECORD", 2**20)
    client = redis_server.client
    redis_server.send("s", numbered(1, 2))
    client.xadd("s", {"other": "field"})
    client.xadd("s", {b"record": b"\xff\xfe"})
    client.xadd("s", {b"record": b"x" * (2**20 + 1)})
    client.xadd("s", {b"record": b""})
    client.xadd("s", {b"\xff": b"\xff"})
    client.xadd("s", {b"record": NESTED})
    client.xadd("s", {"event": "END"})
    redis_server.send("s", [numbered(1, 1)[0]] * 50 + numbered(3, 4))
    redis_server.end("s")
    transport = RedisTransport(url=redis_server.url, stream="s", group="truestep", consumer="trainer")
    source = make_source(transport, stall_timeout=60)
    taken = source.take(9, 0)
    assert ids(taken.documents) == ["1", "2", "3", "4"]
    said = reasons(taken.rejected)
    assert len(said) == 7 + 50
    assert said[2] == "the record is not read: it has more than 1 MiB"
    source.close(True)


@needs_redis
def test_replies_are_read_up_to_a_ceiling(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are too large together are read one by one, and one that is too large alone is named and passed."""
    monkeypatch.setattr("truestep.rollouts.stream.redis._REPLY", 100_000)
    client = redis_server.client
    padded = [one | {"metadata": {"text": "x" * 40_000}} for one in numbered(1, 9)]
    redis_server.send("s", padded[:5])
    client.xadd("s", {"record": "x" * 200_000, "more": "y" * 200_000})
    client.xadd("s", {"record": "x" * 200_000})
    redis_server.send("s", padded[5:])
    redis_server.end("s")
    transport = RedisTransport(url=redis_server.url, stream="s", group="truestep", consumer="trainer")
    source = make_source(transport, stall_timeout=60, ids=Path(tempfile.mkdtemp()))
    taken = source.take(7, 0)
    assert ids(taken.documents) == [str(number) for number in range(1, 8)]
    assert reasons(taken.rejected) == ["the record is not read: it has more than 100,000 bytes"] * 2
    assert ids(source.take(9, 7).documents) == ["8", "9"]
    source.close(True)


@needs_redis
def test_a_restart_behind_entries_that_are_too_large(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truestep.rollouts.stream.redis._REPLY", 100_000)
    redis_server.send("s", numbered(1, 2))
    for _ in range(3):
        redis_server.client.xadd("s", {"record": "x" * 200_000})
    redis_server.send("s", numbered(3, 4))
    for again in range(2):
        transport = RedisTransport(url=redis_server.url, stream="s", group="truestep", consumer="trainer")
        source = make_source(transport, stall_timeout=60)
        taken = source.take(4, 0)
        assert ids(taken.documents) == ["1", "2", "3", "4"], again
        assert len(reasons(taken.rejected)) == 3
        source._reading.close()  # and nothing is acknowledged


@pytest.mark.long
@needs_redis
def test_entries_larger_than_any_record(redis_server: RedisServer) -> None:
    for _ in range(3):
        redis_server.client.xadd("s", {b"record": b'{"metadata": "' + b"x" * 14 * 10**7 + b'"}'})
    redis_server.send("s", numbered(1, 2))
    transport = RedisTransport(url=redis_server.url, stream="s", group="truestep", consumer="trainer")
    source = make_source(transport, stall_timeout=120)
    taken = source.take(2, 0)
    assert ids(taken.documents) == ["1", "2"]
    assert reasons(taken.rejected) == ["the record is not read: it has more than 128 MiB"] * 3
    source.close(True)
