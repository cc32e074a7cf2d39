"""A transport whose records come from a user's function: it returns an iterator from a given record number on."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from truestep.rollouts.source import SourceError
from truestep.rollouts.stream.transport import Message


class GivenTransport:
    """A transport over a user's function. The place in the stream is the number of the next record."""

    def __init__(self, function: str, make: Callable[[int], Iterable[Any]]):
        self.name = f"data.source.function {function}"
        self.ended = False
        self._function, self._make = function, make
        self._records: Iterator[Any] | None = None
        self._number = 0  # the number of the next record

    def fetch(self, count: int, seconds: float) -> list[Message]:
        """Return one message, without waiting for the function to make more records."""
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
        """Do nothing: the function is not told."""

    def announce(self, event: dict[str, Any]) -> None:
        """Do nothing: the function is not told."""

    def hint(self) -> str | None:
        return "the function has not given its next record yet"

    def interrupt(self) -> None:
        """Do nothing: a call of the user's function cannot be interrupted."""

    def close(self) -> None:
        close = getattr(self._records, "close", None)
        if close is not None:
            try:
                close()
            except (ValueError, RuntimeError):  # the generator is running in the reading thread
                return


def _payload(record: Any) -> tuple[bytes, str | None]:
    if not isinstance(record, dict):
        return b"", f"a record is a mapping with the fields of a rollout, not {type(record).__name__}"
    try:
        return json.dumps(record, default=_plain).encode(), None
    except (TypeError, ValueError, RecursionError) as error:
        return b"", f"a record holds what JSON cannot: {error}"


def _plain(value: Any) -> Any:
    """Convert an array to a list for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__}")
