"""The run's connection to the process that forks episodes: starts that process with its supervisor, and exchanges
frames with it."""

import contextlib
import select
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from truestep.environments import frames
from truestep.environments.episodes import wire
from truestep.environments.process import LostError, Supervised, WorkerOptions, printable_traceback
from truestep.environments.rewards import RewardError
from truestep.process import progress
from truestep.text import printable

_LONGEST_WAIT = 0.2  # seconds; each wait is reported as progress, so that the run is not seen as stalled


class Connection(Supervised):
    """A process that forks episodes, and its supervisor. After a LostError both are unusable."""

    _what = "environment"

    def __init__(
        self, options: WorkerOptions, arguments: Mapping[str, Any], printed: Callable[[str], None] | None = None
    ):
        """`options.reward` names the user's class, and `arguments` are the options of that class."""
        super().__init__(options, printed, wire.LARGEST_BODY)
        self._arguments = dict(arguments)
        self._unsent: deque[memoryview] = deque()
        self._killed: dict[int, str] = {}  # by process id, why the supervisor killed an episode's process
        self.is_quiet = True  # True if the last exchange received nothing

    def start(self) -> dict[str, Any]:
        """Wait until the environment is imported, and return the schemas of its tools. Raises RewardError if the import
        fails, and LostError."""
        return self._begin({"environment": self._options.reward, "options": self._arguments}, self._imported)

    def _imported(self, nonce: str, deadline: float) -> dict[str, Any]:
        while (body := self._channel.take_body()) is None:
            self._wait(deadline)
        kind, _, rest = wire.untagged(body)
        message = frames.decode(rest)
        if kind != wire.IMPORTED or message.get("nonce") != nonce:
            raise frames.FrameError("not the answer to what was asked")
        if isinstance(problem := message.get("problem"), str):
            raise RewardError(printable(problem, 1000), printable_traceback(message.get("traceback")))
        if not isinstance(tools := message.get("tools"), dict):
            raise frames.FrameError("no tools")
        return tools

    def post(self, frame: bytes) -> None:
        """Send a frame with the next exchange."""
        self._unsent.append(memoryview(frame))

    def exchange(self, seconds: float | None, woken: int) -> list[bytes]:
        """Send the queued frames, wait up to `seconds` (None: without limit), and return the bodies of received frames.
        Data on the descriptor `woken` ends the wait. Raises LostError.
        """
        try:
            self._send()
            poll = select.poll()
            poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.register(self._control, select.POLLIN)
            poll.register(woken, select.POLLIN)
            wait = None if seconds is None else max(0.0, min(seconds, _LONGEST_WAIT)) * 1000 + 1
            ready = {descriptor for descriptor, _ in poll.poll(wait)}
            if seconds is not None:
                progress.made("waits for environments")
            if self._control.fileno() in ready:
                self._hear_all()
            self.is_quiet = self._channel.fileno() not in ready
            if self.is_quiet and self._ended is not None:
                raise frames.EndOfFramesError
            return [] if self.is_quiet else self._bodies()
        except frames.EndOfFramesError:
            raise self._lost("ended the process that forks its episodes") from None
        except frames.FrameError as error:
            raise LostError(f"the environment wrote to the connection that carries episodes: {error}") from None

    def _hear_all(self) -> None:
        with contextlib.suppress(frames.EndOfFramesError):  # the channel ends as well, after its last frames
            self._hear()

    def _send(self) -> None:
        while self._unsent:
            rest = self._channel.send_some(self._unsent.popleft())
            if rest:
                self._unsent.appendleft(rest)
                return

    def _bodies(self) -> list[bytes]:
        bodies = []
        self._channel.fill()
        while (body := self._channel.take_body()) is not None:
            bodies.append(body)
        return bodies

    def _heard(self, message: dict[str, Any]) -> None:
        if isinstance(process := message.get("killed"), int):
            self._killed[process] = f"{printable(message.get('reason'))}{self._of_memory(str(message.get('reason')))}"

    def why_killed(self, process: Any) -> str | None:
        """Return the reason if the supervisor killed an episode's process, else None. The supervisor sends the reason
        before it kills."""
        with contextlib.suppress(frames.EndOfFramesError, frames.FrameError):
            self._hear()
        return self._killed.pop(process, None)

    def given_up(self, reason: str) -> LostError:
        """End a process that does not answer, and return the error."""
        self.end()
        return LostError(reason)
