"""A transport of a run that another process may take over: the process that lost the run asks for nothing more."""

from collections.abc import Callable
from typing import Any

from truestep.errors import TruestepError
from truestep.rollouts.stream.transport import Message, Transport


class OwnedTransport:
    """A transport that is asked only while `fence` does not raise. The run that took over has the same place in the
    stream: what this process fetched, acknowledged or gave back would be taken from it."""

    def __init__(self, transport: Transport, fence: Callable[[], None]):
        self._transport, self._fence = transport, fence
        self.name = transport.name

    @property
    def ended(self) -> bool:
        return self._transport.ended

    def fetch(self, count: int, seconds: float) -> list[Message]:
        self._fence()
        return self._transport.fetch(count, seconds)

    def state(self) -> dict[str, Any]:
        return self._transport.state()

    def advance(self, place: dict[str, Any], mark: Any) -> None:
        self._transport.advance(place, mark)

    def restore(self, state: dict[str, Any]) -> None:
        self._transport.restore(state)

    def acknowledge(self, state: dict[str, Any]) -> None:
        self._fence()
        self._transport.acknowledge(state)

    def announce(self, event: dict[str, Any]) -> None:
        self._fence()
        self._transport.announce(event)

    def hint(self) -> str | None:
        return self._transport.hint()

    def interrupt(self) -> None:
        self._transport.interrupt()

    def close(self) -> None:
        """Give back what was not acknowledged, and close the connection; only the latter if the run is lost."""
        try:
            self._fence()
        except TruestepError:
            self._transport.interrupt()
        else:
            self._transport.close()
