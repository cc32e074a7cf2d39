"""Work beside a pass begins after what it needs, and what comes later begins after it. Streams are told apart by what
they are asked for, in the order in which the host asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from truestep.gpu import side_stream as beside
from truestep.gpu.side_stream import Beside


class Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def record_event(self) -> str:
        self.told.append(f"{self.name} records")
        return "event"

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for the {event}")

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    streams = {"now": Stream("main", told)}

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, streams["now"] = streams["now"], stream
        told.append(f"on {stream.name}")
        try:
            yield
        finally:
            streams["now"] = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["now"])
    monkeypatch.setattr(torch.cuda, "stream", on)
    own = Stream("own", told)
    monkeypatch.setattr(beside, "_stream", lambda device: own)
    return told


ORDER = ["main records", "own waits for the event", "on own", "work", "main waits for own"]


@pytest.mark.parametrize("fails", [False, True])
def test_it_begins_after_what_it_needs_and_ends_before_what_follows(fails: bool, told: list[str]) -> None:
    work: Any = Beside(torch.device("cuda", 0))
    work.here()

    def run() -> None:
        with work.run():
            told.append("work")
            if fails:
                raise ValueError("a user's own metric")

    if fails:
        with pytest.raises(ValueError, match="a user's own metric"):
            run()
    else:
        run()
    assert told == ORDER


def test_the_last_of_several_heads_counts(told: list[str]) -> None:
    work = Beside(torch.device("cuda", 0))
    work.here()
    work.here()
    with work.run():
        pass
    assert told == ["main records", *ORDER[:3], ORDER[4]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_done_in_place_without_a_gpu_or_a_head(device: str, told: list[str]) -> None:
    work = Beside(torch.device(device))
    if device == "cpu":
        work.here()
    with work.run():
        told.append("work")
    assert told == ["work"]
