"""Messages that a thread reads ahead: in order, bounded, ended at once, and no error of it is lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollouts.rollout_records import NEEDS, record
from truestep.rollouts.record import BadRecord, Checks
from truestep.rollouts.source import SourceError
from truestep.rollouts.stream import reading
from truestep.rollouts.stream.reading import Arrived, Reading
from truestep.rollouts.stream.transport import Message, TransportError
from truestep.types import Rollout

CHECKS = Checks(vocabulary_size=100, max_tokens=16, needs=NEEDS, group_size=2)


class Listed:
    """A transport of listed messages; an exception among them is raised."""

    def __init__(self, *contents: Any, ended: bool = True):
        self._contents = list(contents)
        self._ends = ended
        self.ended = False
        self.name = "a list"
        self.given = 0
        self.fetches = 0
        self.interrupted = threading.Event()

    def fetch(self, count: int, seconds: float) -> list[Message]:
        self.fetches += 1
        messages: list[Message] = []
        while self._contents and len(messages) < count:
            if isinstance(self._contents[0], Exception):
                if messages:
                    break
                raise self._contents.pop(0)
            self.given += 1
            payload = self._contents.pop(0)
            messages.append(Message(f"m:{self.given}", "m", self.given, payload, mark=self.given))
        if not messages and self._ends:
            self.ended = True
        elif not messages:
            self.interrupted.wait(min(seconds, 0.02))
        return messages

    def interrupt(self) -> None:
        self.interrupted.set()


def payload(number: int, padding: int = 0) -> bytes:
    return json.dumps(record(str(number), 1.0, metadata={"padding": "x" * padding})).encode()


@pytest.fixture
def read() -> Iterator[Callable[..., Reading]]:
    made: list[Reading] = []

    def make(transport: Any, **options: Any) -> Reading:
        made.append(Reading(transport, CHECKS, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one._thread is None or not one._thread.is_alive()


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def everything(one: Reading) -> list[Arrived]:
    arrived = []
    while not one.ended:
        following = one.next(30)
        if following is not None:
            arrived.append(following)
    return arrived


def test_all_messages_come_once_and_in_order(read: Callable[..., Reading]) -> None:
    contents = [payload(number) if number % 7 else b"no record" for number in range(300)]
    arrived = everything(read(Listed(*contents), most_messages=10))
    assert [one.message.mark for one in arrived] == list(range(1, 301))
    for number, one in enumerate(arrived):
        if number % 7:
            assert isinstance(one.outcome, Rollout)
            assert one.outcome.id == str(number)
        else:
            assert isinstance(one.outcome, BadRecord)
        assert one.message.payload == b"", "what was parsed is not held twice"


def test_no_more_is_read_ahead_than_the_bounds_allow(read: Callable[..., Reading]) -> None:
    transport = Listed(*[payload(number) for number in range(500)])
    one = read(transport, most_messages=20)
    one.next(30)
    until(lambda: one.ahead[0] >= 20)
    time.sleep(0.05)
    assert one.ahead[0] < 20 + 64, "the look that crossed the bound, and none after it"
    given = transport.given
    time.sleep(0.05)
    assert transport.given == given


def test_large_messages_are_bounded_by_their_bytes(
    read: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FEW_BYTES", 10_000)
    one = read(Listed(*[payload(number, padding=5000) for number in range(100)]), most_bytes=50_000)
    one.next(30)
    until(lambda: one.ahead[1] >= 50_000)
    time.sleep(0.05)
    assert one.ahead[1] < 50_000 + 4 * 6000
    assert len(everything(one)) == 99


def test_an_error_comes_behind_the_messages_before_it(read: Callable[..., Reading]) -> None:
    one = read(Listed(payload(1), payload(2), SourceError("two runs share a group"), payload(3)))
    assert one.next(30) is not None
    assert one.next(30) is not None
    for _ in range(2):  # and again, should somebody ask again
        with pytest.raises(SourceError, match="two runs share a group"):
            one.next(30)


def test_any_error_of_the_thread_is_the_runs(read: Callable[..., Reading]) -> None:
    one = read(Listed(ZeroDivisionError("a fault")))
    with pytest.raises(ZeroDivisionError, match="a fault"):
        one.next(30)


def test_what_may_pass_is_tried_again_and_said_meanwhile(read: Callable[..., Reading]) -> None:
    transport = Listed(TransportError("away"), TransportError("away"), payload(1))
    one = read(transport)
    troubles = set()
    while (arrived := one.next(0.005)) is None:
        troubles.add(one.trouble)
    assert "away" in troubles
    assert isinstance(arrived.outcome, Rollout)
    assert one.trouble is None


def test_the_clock_stands_still_while_nothing_need_be_read(read: Callable[..., Reading]) -> None:
    """A group is given up by this clock: a long step must not make it late."""
    one = read(Listed(*[payload(number) for number in range(200)], ended=False), most_messages=5)
    one.next(30)
    until(lambda: one.ahead[0] >= 5)
    time.sleep(0.05)
    before = one.clock
    time.sleep(0.2)
    assert one.clock == before
    while one.next(0.01) is not None:
        pass
    until(lambda: one.clock > before)


def test_an_end_that_was_known_before_is_not_read_over(read: Callable[..., Reading]) -> None:
    transport = Listed(payload(1))
    transport.ended = True  # as a checkpoint of the end leaves it
    one = read(transport)
    assert one.next(30) is None
    until(lambda: one.ended)
    assert transport.fetches == 0


@pytest.mark.parametrize("full", [False, True])
def test_the_thread_ends_where_it_waits(full: bool) -> None:
    transport = Listed(*[payload(number) for number in range(50 if full else 0)], ended=False)
    one = Reading(transport, CHECKS, most_messages=1)
    one.next(0.01)
    one.close()
    assert one._thread is not None
    assert not one._thread.is_alive()


def test_a_look_under_way_ends_by_itself_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was cut off may be carried out by its server later: its messages would be given to nobody."""
    monkeypatch.setattr(reading, "_LAST_LOOK", 100.0)
    transport = Listed(payload(1), ended=False)
    one = Reading(transport, CHECKS)
    one.next(100)
    until(lambda: transport.fetches > 1)
    one.close()
    assert not transport.interrupted.is_set()
    assert one._thread is not None and not one._thread.is_alive()


def test_a_look_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LAST_LOOK", 0.01)
    transport = Listed(payload(1), ended=False)
    monkeypatch.setattr(transport, "fetch", lambda count, seconds: transport.interrupted.wait(100) and [])
    one = Reading(transport, CHECKS)
    one.next(0.01)
    one.close()
    assert transport.interrupted.is_set()
    assert one._thread is not None and not one._thread.is_alive()


def test_a_message_too_large_is_not_parsed(read: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.files.bounded.RECORD", 2**20)
    arrived = everything(read(Listed(payload(1, padding=2**20), payload(2))))
    assert isinstance(arrived[0].outcome, BadRecord)
    assert arrived[0].outcome.reason == "the record is not read: it has more than 1 MiB"
    assert isinstance(arrived[1].outcome, Rollout)
