"""A clock that goes on only when the code waits, so that a test of waiting takes no time and knows how long it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from truestep.rollouts.record import Checks
from truestep.rollouts.stream.reading import Arrived, parse_message
from truestep.rollouts.stream.transport import Message, Transport, TransportError


class Clock:
    """Stands in for the module `time`. What is due happens during a wait, at its own time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., Any], *arguments: Any) -> None:
        self._due.append((time, action, arguments))
        self._due.sort(key=lambda due: due[0])

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + max(seconds, 1e-9)  # a wait too short to tell would be repeated for ever
        while self._due and self._due[0][0] <= end:
            time, action, arguments = self._due.pop(0)
            self.now = max(self.now, time)
            action(*arguments)
        self.now = end


class ReadingOnClock:
    """A transport's messages as `Reading` gives them, without a thread: what comes is due at times of the clock."""

    def __init__(self, transport: Transport, checks: Checks, clock: Clock):
        self._transport, self._checks, self._time = transport, checks, clock
        self._arrived: list[Message] = []
        self.trouble: str | None = None

    def next(self, seconds: float) -> Arrived | None:
        end = self._time.now + seconds
        while not self._arrived:
            try:
                self._arrived = self._transport.fetch(64, 0.0)
                self.trouble = None
            except TransportError as error:
                self.trouble = str(error)
            if self._arrived:
                break
            if self._time.now >= end:
                return None
            self._time.sleep(min(0.01, end - self._time.now))
        message = self._arrived.pop(0)
        return Arrived(message, parse_message(message, self._checks), self._time.now)

    @property
    def ended(self) -> bool:
        return self._transport.ended and not self._arrived

    @property
    def clock(self) -> float:
        return self._time.now

    def close(self) -> None: ...
