"""A stream as a source: it waits for documents, says what it waited for, and acknowledges what a checkpoint holds."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from documents import same_document
from rollouts.rollout_records import NEEDS, record
from small_runs import read_lines, write_lines
from stream.clock import Clock, ReadingOnClock
from stream.redis_server import RedisServer, needs_redis
from truestep.rollouts.record import Checks
from truestep.rollouts.source import SourceError
from truestep.rollouts.stream.announcements import Announcements
from truestep.rollouts.stream.directory import DirectoryTransport
from truestep.rollouts.stream.ids import SeenIds
from truestep.rollouts.stream.redis import RedisTransport
from truestep.rollouts.stream.source import StreamSource
from truestep.rollouts.stream.transport import Transport
from truestep.types import Rejected, Rollout

BAD = {"input_ids": []}


made: list[StreamSource] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """End the threads of the sources that a test made."""
    yield
    while made:
        made.pop()._reading.close()


def make_source(
    transport: Transport,
    stall_timeout: float | None = None,
    group_size: int = 1,
    ids: Path | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> StreamSource:
    checks = Checks(vocabulary_size=100, default_temperature=1.0, max_tokens=16, needs=NEEDS, group_size=group_size)
    seen = SeenIds((ids or Path(tempfile.mkdtemp())) / "ids")
    reading: Any = None if clock is None else ReadingOnClock(transport, checks, clock)
    if stall_timeout is None:  # by the test's own clock nothing is late because the machine is busy
        stall_timeout = 60.0 if clock is None else 0.3
    source = StreamSource(transport, checks, stall_timeout, seen, reading=reading, **options)
    made.append(source)
    return source


def numbered(first: int, last: int, **fields: Any) -> list[dict[str, Any]]:
    return [record(str(number), float(number), f"g{number}", **fields) for number in range(first, last + 1)]


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ids(documents: Sequence[Rollout]) -> list[str]:
    return [document.id for document in documents]


def over_redis(server: RedisServer, **options: Any) -> StreamSource:
    transport = RedisTransport(url=server.url, stream="s", group="truestep", consumer="trainer")
    return make_source(transport, **options)


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., None]:
    count = 0

    def put(records: list[dict[str, Any]]) -> None:
        nonlocal count
        count += 1
        write_lines(tmp_path / "beside", records).rename(tmp_path / f"{count}.jsonl")

    return put


def test_looking_takes_nothing_and_taking_takes_once(tmp_path: Path, put: Callable[..., None]) -> None:
    source = make_source(DirectoryTransport(tmp_path))
    put(numbered(1, 5))
    assert ids(source.peek(2)) == ["1", "2"]
    assert ids(source.peek(3)) == ["1", "2", "3"]
    assert ids(source.take(2, 0).documents) == ["1", "2"]
    assert ids(source.take(2, 2).documents) == ["3", "4"]


def test_fewer_only_at_the_end(tmp_path: Path, put: Callable[..., None]) -> None:
    source = make_source(DirectoryTransport(tmp_path), stall_timeout=20)
    put(numbered(1, 3))
    threading.Timer(0.2, lambda: (put(numbered(4, 5)), (tmp_path / "END").touch())).start()
    assert ids(source.peek(4)) == ["1", "2", "3", "4"]
    assert ids(source.peek(9)) == ["1", "2", "3", "4", "5"]
    assert ids(source.take(9, 0).documents) == ["1", "2", "3", "4", "5"]
    assert source.peek(1) == []


def test_what_is_read_ahead_is_not_in_the_state(tmp_path: Path, put: Callable[..., None]) -> None:
    source = make_source(DirectoryTransport(tmp_path), stall_timeout=20)
    put(numbered(1, 50))
    source.peek(3)
    until(lambda: source._reading.ahead[0] == 47)
    lines, size, _ = source.state()["transport"]["files"]["1.jsonl"]
    assert (lines, size) == (3, 3 * len(json.dumps(numbered(1, 1)[0]) + "\n"))


@pytest.mark.parametrize("how", ["renamed", "written over", "removed and made again", "over a restart"])
def test_records_without_ids_in_a_file_whose_name_is_used_again(how: str, tmp_path: Path) -> None:
    """What came before is not trained on again, and what is new is, though its place is that of another record."""
    path, beside = tmp_path / "a.jsonl", tmp_path / ".beside"
    lines = [json.dumps({name: value for name, value in one.items() if name != "id"}) for one in numbered(1, 5)]
    path.write_text("\n".join(lines[:3]) + "\n")
    source = make_source(DirectoryTransport(tmp_path), stall_timeout=20, ids=tmp_path)
    assert ids(source.take(3, 0).documents) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    beside.write_text("\n".join([lines[0], lines[3], lines[2], lines[4]]) + "\n")
    if how in ("renamed", "over a restart"):
        beside.rename(path)
    elif how == "written over":
        path.write_bytes(beside.read_bytes())
    else:
        path.unlink()
        beside.rename(path)
    if how == "over a restart":
        state = json.loads(json.dumps(source.state()))
        source = make_source(DirectoryTransport(tmp_path), stall_timeout=20, ids=tmp_path)
        source.restore(state)
    taken = source.take(2, 3)
    assert ids(taken.documents) == ["a.jsonl:2#2", "a.jsonl:4"]
    assert [(one.line, one.reason) for one in taken.rejected] == [
        (1, "id is 'a.jsonl:1': repeated, a document of this id came before"),
        (3, "id is 'a.jsonl:3': repeated, a document of this id came before"),
    ]


def test_the_error_says_what_was_waited_for(tmp_path: Path, put: Callable[..., None], clock: Clock) -> None:
    source = make_source(DirectoryTransport(tmp_path), group_size=2, clock=clock)
    put([record("a", 1.0, "g"), record("b", 2.0, "g"), record("c", 1.0, "h"), record("d", 1.0) | BAD])
    rejected: list[Rejected] = []
    source.put_rejected = rejected.extend
    with pytest.raises(SourceError) as caught:
        source.peek(8)
    assert clock.now == pytest.approx(0.3)
    assert str(caught.value) == (
        f"the directory {tmp_path} gave no document for 0.3 s (schedule.stall_timeout); 2 of the 8 documents that the "
        "step waits for are there; in groups that are not complete: 1 in 1 (data.group_size); rejected meanwhile: 1, "
        "see rejected.jsonl; files are read whose names end in .jsonl"
    )
    assert len(rejected) == 1


def test_a_slow_sender_is_alive_and_one_that_sends_only_bad_records_is_not(
    tmp_path: Path, put: Callable[..., None], clock: Clock
) -> None:
    source = make_source(DirectoryTransport(tmp_path), stall_timeout=1.0, clock=clock)
    for number in range(1, 7):
        clock.at(0.9 * number, put, numbered(number, number))
    assert len(source.peek(6)) == 6
    began = clock.now
    for number in range(100):
        clock.at(began + 0.1 + 0.25 * number, put, [record(f"bad {number}", 1.0) | BAD])
    with pytest.raises(SourceError, match="rejected meanwhile: 4"):
        source.peek(100)
    assert clock.now == pytest.approx(began + 1.0)


def test_only_a_new_checkpoint_acknowledges(tmp_path: Path, put: Callable[..., None]) -> None:
    """The last one of a run may be the one that was there: it does not hold what was read since."""
    transport = DirectoryTransport(tmp_path)
    source, announcements = make_source(transport), Announcements(transport)
    put(numbered(1, 2))
    source.take(2, 0)
    announcements.updated(1, 2)
    source.state()
    assert not (tmp_path / "events.jsonl").exists(), "taken, and in no complete checkpoint"
    source.checkpointed(2)
    announcements.saved(tmp_path / "step-1", 1, 2)
    put(numbered(3, 4))
    source.peek(2)
    source.state()
    source.checkpointed(2)
    announcements.saved(tmp_path / "step-1", 1, 2)
    announcements.ended("", finished=True)
    source.close(True)
    assert read_lines(tmp_path / "events.jsonl") == [
        {"event": "acknowledged", "files": ["1.jsonl"]},
        {"event": "weights_ready", "step": 1, "documents_seen": 2, "path": str(tmp_path / "step-1")},
        {"event": "training_finished", "documents_seen": 2},
    ]


def test_a_run_that_stopped_early_is_not_finished(tmp_path: Path) -> None:
    transport = DirectoryTransport(tmp_path)
    Announcements(transport).ended("", finished=False)
    make_source(transport).close(False)
    assert not (tmp_path / "events.jsonl").exists()


def test_a_checkpoint_of_other_documents(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="data.source: this run's checkpoint was made from rollout files"):
        make_source(DirectoryTransport(tmp_path)).restore({"position": 3, "fingerprint": "f"})


def test_a_restart_has_the_open_groups_and_the_baseline_of_one_that_was_cut(
    tmp_path: Path, put: Callable[..., None]
) -> None:
    source = make_source(DirectoryTransport(tmp_path), group_size=3, ids=tmp_path)
    put([record(f"{name}{place}", float(place), name) for place, name in enumerate("abaabcb")])
    assert ids(source.take(2, 0).documents) == ["a0", "a2"]
    held = json.loads(json.dumps(source.state()))
    again = make_source(DirectoryTransport(tmp_path), group_size=3, ids=tmp_path)
    again.restore(held)
    straight, resumed = source.take(4, 2).documents, again.take(4, 2).documents
    assert ids(straight) == ids(resumed) == ["a3", "b1", "b4", "b6"]
    assert all(same_document(*pair) for pair in zip(straight, resumed, strict=True))


@needs_redis
def test_a_server_that_comes_back_in_time(redis_server: RedisServer) -> None:
    source = over_redis(redis_server, stall_timeout=20)
    redis_server.send("s", numbered(1, 2))
    assert len(source.peek(2)) == 2
    redis_server.kill()
    threading.Timer(0.5, lambda: (redis_server.start(), redis_server.send("s", numbered(3, 4)))).start()
    assert ids(source.peek(4)) == ["1", "2", "3", "4"]


@needs_redis
def test_a_server_that_is_gone_for_good(redis_server: RedisServer, clock: Clock) -> None:
    source = over_redis(redis_server, stall_timeout=0.5, clock=clock)
    redis_server.send("s", numbered(1, 2))
    source.peek(2)
    redis_server.kill()
    clock.now = 0.0
    with pytest.raises(
        SourceError,
        match=r"the stream 's' of redis at 127.0.0.1:\d+ gave no document for 0.5 s .*2 of the 3 documents .* refused",
    ):
        source.peek(3)
    assert clock.now == pytest.approx(0.5)


@needs_redis
def test_a_checkpoint_is_acknowledged_by_the_restart_if_need_be(redis_server: RedisServer, tmp_path: Path) -> None:
    dead = over_redis(redis_server, ids=tmp_path)
    redis_server.send("s", numbered(1, 4))
    dead.take(2, 0)
    dead.peek(1)
    held = json.loads(json.dumps(dead.state()))
    dead._reading.close()
    again = over_redis(redis_server, ids=tmp_path)
    again.restore(held)
    assert len(redis_server.pending("s")) >= 2, "it may be a state in memory, which can be lost"
    again.checkpointed(2)
    assert len(redis_server.pending("s")) <= 1, "what the dead one read ahead of its place"
    Announcements(again._transport).saved(tmp_path, 1, 2)
    assert [event["event"] for event in redis_server.events("s:events")] == ["weights_ready"]
    assert ids(again.take(2, 2).documents) == ["3", "4"]


def test_a_checkpoint_acknowledges_what_it_holds_and_no_more(tmp_path: Path, put: Callable[..., None]) -> None:
    """The state of a later one is made before the first is complete."""
    source = make_source(DirectoryTransport(tmp_path))
    for first in (1, 3):
        put(numbered(first, first + 1))
        source.take(2, first - 1)
        source.state()
    for step in (1, 2):
        source.checkpointed(2 * step)
        events = [event for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "acknowledged"]
        assert [event["files"] for event in events] == [[f"{number}.jsonl"] for number in range(1, step + 1)]
