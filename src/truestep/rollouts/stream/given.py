"""Records that a user's own function gives, as the messages of a stream: an iterator, begun where a run stands."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from truestep.rollouts.source import SourceError
from truestep.rollouts.stream.transport import Message


class GivenTransport:
    """Asks the function for the records from a number on; the place in the stream is the next record's number."""

    def __init__(self, function: str, make: Callable[[int], Iterable[Any]]):
        self.name = f"data.source.function {function}"
        self.ended = False
        self._function, self._make = function, make
        self._records: Iterator[Any] | None = None
        self._number = 0  # of the next record

    def fetch(self, count: int, seconds: float) -> list[Message]:
        """Give one message: more would wait for a source that makes its records one after another."""
        try:
            if self._records is None:
                self._records = iter(self._make(self._number))
            record = next(self._records)
        except StopIteration:
            self.ended = True
            return []
        except Exception as error:
            raise SourceError(
                f"{self.name} raised {type(error).__name__}: {error}, at record {self._number}"
            ) from error
        number, self._number = self._number, self._number + 1
        payload, problem = _payload(record)
        return [Message(f"{self._function}:{number}", self._function, number, payload, problem, {"next": number + 1})]

    def state(self) -> dict[str, Any]:
        return {"next": self._number}

    def advance(self, place: dict[str, Any], mark: Any) -> None:
        place["next"] = mark["next"]

    def restore(self, state: dict[str, Any]) -> None:
        if set(state) != {"next"}:
            raise SourceError("data.source: this run's checkpoint was made from another kind of data.source")
        self._records, self._number = None, state["next"]

    def acknowledge(self, state: dict[str, Any]) -> None:
        """Nobody waits to hear of it."""

    def announce(self, event: dict[str, Any]) -> None:
        """Nobody waits to hear of it."""

    def hint(self) -> str | None:
        return "the function has not given its next record yet"

    def interrupt(self) -> None:
        """Only the function itself can end its waiting."""

    def close(self) -> None:
        close = getattr(self._records, "close", None)
        if close is not None:
            try:
                close()
            except (ValueError, RuntimeError):  # a generator that is at work in the thread that reads
                return


def _payload(record: Any) -> tuple[bytes, str | None]:
    if not isinstance(record, dict):
        return b"", f"a record is a mapping with the fields of a rollout, not {type(record).__name__}"
    try:
        return json.dumps(record, default=_plain).encode(), None
    except (TypeError, ValueError, RecursionError) as error:
        return b"", f"a record holds what JSON cannot: {error}"


def _plain(value: Any) -> Any:
    """Give an array's numbers as a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__}")
