"""The keeper's part in rating: it hands the worker one request at a time, of the many that the run sends ahead.

The run need not wake up for each completion, and yet the code of one never meets the request of another: the next one
goes to the worker when the last one is answered. What the worker says is passed on as it is, and the run judges it.
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
_HOLD = 0.005  # seconds that an answer may wait for others, so that the run wakes up once for them
# A completion that takes longer does not keep those behind it waiting: another worker may rate them.
PATIENCE = 0.1


class Valve:
    """Connects the run with the worker. `between` is called when a completion was rated, before the next one."""

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
        self._waiting: deque[bytes] = deque()  # not with the worker
        self._received = 0
        self._unsent = memoryview(b"")  # of the request that the worker is at
        # When the worker was asked; None: it is asked nothing. First it says that it has imported the reward.
        self._since: float | None = time.monotonic()
        self.started = False  # the worker has imported the reward
        self._answer = bytearray()  # as much as has come
        self._held = bytearray()  # answers that the run does not have yet
        self._held_since = 0.0
        self._rated, self._seconds = 0, 0.0  # of the answers that are held
        self._broken = False  # the worker said what was not asked, or left: it is asked nothing more
        self._shut = False
        self._wanted = 0, 0  # of both connections

    def register(self, poll: "select.poll") -> None:
        """Say what to wait for."""
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
        """Shorten a wait to when this has something to do."""
        if self._held and not self._wanted[0] & select.POLLOUT:
            seconds = min(seconds, max(0.0, self._due()))
        if self._waiting and self._since is not None:
            seconds = min(seconds, max(0.0, self._since + PATIENCE - time.monotonic()))
        return seconds

    def turn(self, ready: set[int]) -> bool:
        """Do what can be done now; False where the run is gone."""
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
                self._run.shutdown(socket.SHUT_WR)  # the run is not to wait for what never comes
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
        """Take what the worker says. More than the one answer, or an answer at no time, is its end."""
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
            except OSError:  # what it said before it left is read first
                self._unsent = memoryview(b"")

    def _return_waiting(self) -> None:
        """Give back to the run what the worker has not seen, by its place among all requests, from 1."""
        self._say({"returned": [self._received - len(self._waiting) + 1, self._received]})
        self._waiting.clear()

    def flush(self) -> None:
        """Pass on the answers that are held, as far as the run takes them."""
        if self._rated:
            self._say({"rated": self._rated, "seconds": self._seconds})
            self._rated, self._seconds = 0, 0.0
        with contextlib.suppress(OSError):
            while self._held:
                del self._held[: self._run.send(self._held)]

    def drain(self) -> None:
        """Pass on what a worker that has ended said before."""
        if not self._broken:
            self._read_answer()
        self.flush()
