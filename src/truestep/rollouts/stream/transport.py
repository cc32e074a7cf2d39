"""The interface of transports: ordered messages, a place in their order, and events for the senders."""

from dataclasses import dataclass
from typing import Any, Protocol

from truestep.errors import TruestepError


class TransportError(TruestepError):
    """A temporary error: nothing can be read now, and the caller retries for a while."""


@dataclass(frozen=True)
class Message:
    """One record as it was sent."""

    where: str  # default id of the record, the same whenever the message is read again
    file: str
    line: int
    payload: bytes
    problem: str | None = None  # reason why the payload could not be read
    mark: Any = None  # argument of `Transport.advance`; None: the message does not move the place
    blank: bool = False  # no record: the message only moves the place
    content: str | None = None  # key of place and content, for transports that may reuse `where`


class Transport(Protocol):
    """A carrier of messages. One thread calls `fetch`, and another calls the other methods concurrently."""

    name: str  # in error messages

    @property
    def ended(self) -> bool:
        """True if the sender has announced the end, and all messages were fetched."""
        ...

    def fetch(self, count: int, seconds: float) -> list[Message]:
        """Return at most `count` next messages in order, plus blank ones; [] if none come within `seconds`.

        Raises `TransportError` if nothing can be read.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the place after the messages fetched so far, as JSON values."""
        ...

    def advance(self, place: dict[str, Any], mark: Any) -> None:
        """Move `place`, a result of `state`, past the message with this mark. Changes nothing else."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the place `state`. Later messages that a killed process had fetched are delivered again."""
        ...

    def acknowledge(self, state: dict[str, Any]) -> None:
        """Acknowledge the messages up to the place `state`, now or as soon as the server can be reached."""
        ...

    def announce(self, event: dict[str, Any]) -> None:
        """Send an event to the senders, now or as soon as possible. They may receive it twice."""
        ...

    def hint(self) -> str | None:
        """Return a likely reason why no messages come."""
        ...

    def interrupt(self) -> None:
        """Stop a `fetch` in progress in another thread; its messages are discarded."""
        ...

    def close(self) -> None: ...
