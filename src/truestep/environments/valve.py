"""The supervisor's relay: it gives the worker one request at a time, of the many that the run sends ahead.

The next request goes to the worker only when the current one is answered, so the code of one completion never sees the
request of another, and the run need not wake up for each completion. Answers are passed on unchanged; the run checks
them.
"""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from truestep.environments import frames

_PORTION = 2**16
_HOLD = 0.005  # seconds that an answer is held back to be sent with later answers
PATIENCE = 0.1  # seconds after which a slow completion's queue is returned to the run, for other workers


class Valve:
    """A relay between run and worker. `between` is called after a completion is rated, before the next one."""

    def __init__(
        self,
        run: socket.socket,
        worker: socket.socket,
        between: Callable[[], None],
        say: Callable[[dict[str, Any]], None],
    ):
        self._run, self._worker, self._between, self._say = run, worker, between, say
        run.setblocking(False)
        worker.setblocking(False)
        self._requests = frames.Frames(run, frames.LARGEST_REQUEST)
        self._waiting: deque[bytes] = deque()  # requests not yet given to the worker
        self._received = 0  # number of requests from the run
        self._unsent = memoryview(b"")  # unsent bytes of the worker's current request
        # Time of the current request; None: the worker is idle. The first answer reports the import of the reward.
        self._since: float | None = time.monotonic()
        self.started = False  # the worker has imported the reward
        self._answer = bytearray()  # received bytes of the current answer
        self._held = bytearray()  # answers not yet sent to the run
        self._held_since = 0.0
        self._rated, self._seconds = 0, 0.0  # number and duration of the ratings in `_held`
        self._broken = False  # the worker exited or sent an unexpected answer: it gets no more requests
        self._shut = False
        self._wanted = 0, 0  # registered poll events of the run's and the worker's connection

    def register(self, poll: "select.poll") -> None:
        """Register both connections with a poll object, for the events that are needed now."""
        late = self._held and self._due() <= 0
        wanted = (
            select.POLLIN | (select.POLLOUT if late else 0),
            select.POLLIN | (select.POLLOUT if self._unsent else 0),
        )
        if self._broken:
            wanted = wanted[0], 0
        for connection, events, before in zip((self._run, self._worker), wanted, self._wanted, strict=True):
            if events and events != before:
                poll.register(connection, events)
            elif before and not events:
                poll.unregister(connection)
        self._wanted = wanted

    def wait_at_most(self, seconds: float) -> float:
        """Return `seconds`, or less if an answer or a request is due earlier."""
        if self._held and not self._wanted[0] & select.POLLOUT:
            seconds = min(seconds, max(0.0, self._due()))
        if self._waiting and self._since is not None:
            seconds = min(seconds, max(0.0, self._since + PATIENCE - time.monotonic()))
        return seconds

    def turn(self, ready: set[int]) -> bool:
        """Process ready connections and due answers. Returns False if the run is gone."""
        if self._run.fileno() in ready and not self._read_requests():
            return False
        if self._worker.fileno() in ready and not self._broken:
            self._read_answer()
        self._hand_on()
        if self._waiting and self._since is not None and time.monotonic() - self._since >= PATIENCE:
            self._return_waiting()
        if self._held and (self._since is None or self._broken or self._due() <= 0):
            self.flush()
        if self._broken and not self._held and not self._shut:
            self._shut = True
            with contextlib.suppress(OSError):
                self._run.shutdown(socket.SHUT_WR)  # tells the run that no more answers come
        return True

    def _due(self) -> float:
        return self._held_since + _HOLD - time.monotonic()

    def _read_requests(self) -> bool:
        try:
            self._requests.fill()
            while (body := self._requests.take_body()) is not None:
                self._waiting.append(frames.framed(body))
                self._received += 1
        except (frames.EndOfFramesError, frames.FrameError):
            return False
        return True

    def _read_answer(self) -> None:
        """Read from the worker. Extra bytes after an answer, or an answer without a request, mark it as broken."""
        try:
            portion = self._worker.recv(_PORTION)
        except BlockingIOError:
            return
        except OSError:
            portion = b""
        self._answer += portion
        length = frames.length_of(self._answer)
        said_too_much = length is not None and (
            length > frames.HEADER + frames.LARGEST_ANSWER or len(self._answer) > length
        )
        self._broken = not portion or self._since is None or bool(self._unsent) or said_too_much
        if not self._broken and len(self._answer) != length:
            return
        if not self._held:
            self._held_since = time.monotonic()
        self._held += self._answer
        self._answer.clear()
        if self._broken or self._since is None:
            return
        if self.started:
            self._seconds += time.monotonic() - self._since
            self._rated += 1
            self._between()
        self.started, self._since, self._unsent = True, None, memoryview(b"")

    def _hand_on(self) -> None:
        if self._broken:
            return
        if self._since is None and self._waiting:
            self._unsent = memoryview(self._waiting.popleft())
            self._since = time.monotonic()
        while self._unsent:
            try:
                self._unsent = self._unsent[self._worker.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # the worker has exited; its last bytes are still read
                self._unsent = memoryview(b"")

    def _return_waiting(self) -> None:
        """Return the waiting requests to the run, by their numbers among all requests (from 1)."""
        self._say({"returned": [self._received - len(self._waiting) + 1, self._received]})
        self._waiting.clear()

    def flush(self) -> None:
        """Send the held answers to the run, as far as possible without waiting."""
        if self._rated:
            self._say({"rated": self._rated, "seconds": self._seconds})
            self._rated, self._seconds = 0, 0.0
        with contextlib.suppress(OSError):
            while self._held:
                del self._held[: self._run.send(self._held)]

    def drain(self) -> None:
        """Read and send the last answers of a worker that has exited."""
        if not self._broken:
            self._read_answer()
        self.flush()
