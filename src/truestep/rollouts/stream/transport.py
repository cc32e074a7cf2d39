"""The interface of whatever carries a stream's messages: an order, a place in it, and events for the senders."""

from dataclasses import dataclass
from typing import Any, Protocol

from truestep.errors import TruestepError


class TransportError(TruestepError):
    """An error that may pass: nothing can be read now, so the caller tries again for a while."""


@dataclass(frozen=True)
class Message:
    """One record as it was sent."""

    where: str  # the default id of its record: the same however often the message is read
    file: str
    line: int
    payload: bytes
    problem: str | None = None  # why there is no payload to read
    mark: Any = None  # what `Transport.advance` needs; None: the place stays what it was
    blank: bool = False  # no record: it only moves the place
    content: str | None = None  # names what was sent where `where` may be used again: the same record has the same


class Transport(Protocol):
    """What carries messages. One thread fetches, and another does all else at the same time."""

    name: str  # as an error message calls it
    ended: bool  # the sender has said that nothing more comes, and all that did was fetched

    def fetch(self, count: int, seconds: float) -> list[Message]:
        """Give the next messages in order, at most `count` and each once, and blank ones besides; [] where none came
        within `seconds`. Where nothing can be read, raise a `TransportError`."""
        ...

    def state(self) -> dict[str, Any]:
        """Describe, as JSON, which messages were given so far: the place in the stream."""
        ...

    def advance(self, place: dict[str, Any], mark: Any) -> None:
        """Move a place, as `state` gives it, behind the message that has this mark. Touches nothing else."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Give the messages that follow those of `state`, whether or not they were given to a process that died."""
        ...

    def acknowledge(self, state: dict[str, Any]) -> None:
        """Tell the carrier, now or as soon as it can be reached, that the messages of `state` are done with."""
        ...

    def announce(self, event: dict[str, Any]) -> None:
        """Tell the senders, now or as soon as they can be reached; perhaps twice."""
        ...

    def hint(self) -> str | None:
        """Guess why nothing comes."""
        ...

    def interrupt(self) -> None:
        """End a `fetch` that is under way in another thread: nothing of it is wanted any more."""
        ...

    def close(self) -> None: ...
