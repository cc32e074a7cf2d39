"""The transport of a run that another process may take over. After that, this process sends the stream no requests."""

from collections.abc import Callable
from typing import Any

from truestep.errors import TruestepError
from truestep.rollouts.stream.transport import Message, Transport


class OwnedTransport:
    """A transport that calls `fence` before each request; `fence` raises if another process has taken over the run.
    That process reads at the same place of the stream: it would miss messages that this one fetched, acknowledged or
    gave back."""

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
        """Give back unacknowledged messages, unless another process has taken over the run, and close the
        connection."""
        try:
            self._fence()
        except TruestepError:
            self._transport.interrupt()
        else:
            self._transport.close()
