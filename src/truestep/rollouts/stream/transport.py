"""What a stream needs of whatever carries its messages: an order, a place in it, and word back to the senders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from truestep.errors import TruestepError


class TransportError(TruestepError):
    """Nothing can be read now. It may pass, so whoever asked tries again for a while."""


@dataclass(frozen=True)
class Message:
    """One record as it was sent."""

    where: str  # the id of a record without one: the same however often the message is read
    file: str
    line: int
    payload: bytes
    problem: str | None = None  # why there is no payload to read


class Transport(Protocol):
    name: str  # as an error message calls it
    ended: bool  # the sender has said that nothing more comes, and all that did was fetched

    def fetch(self, count: int, seconds: float) -> list[Message]:
        """Give at most `count` messages, the next in order, each of them once; [] where none came within `seconds`.
        `TransportError` where it cannot be known."""
        ...

    def state(self) -> dict[str, Any]:
        """Describe, as JSON, which messages were given so far."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Give the messages that follow those of `state`, whether or not they were given to a process that died."""
        ...

    def acknowledge(self, state: dict[str, Any]) -> None:
        """Say that the messages of `state` need never be given again; where that cannot be said now, later."""
        ...

    def announce(self, event: dict[str, Any]) -> None:
        """Tell the senders, now or as soon as they can be reached; perhaps twice."""
        ...

    def hint(self) -> str | None:
        """Guess what is the matter where nothing comes."""
        ...

    def close(self) -> None: ...
