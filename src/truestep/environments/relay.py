"""Passes bytes in both directions between the run and the worker, in the supervisor. The run checks all data that it
gets."""

import contextlib
import select
import socket
import time
from collections.abc import Callable

_PORTION = 2**18
_MOST_WAITING = 2**20  # bytes read ahead in one direction
_SAYS_EVERY = 0.2  # seconds


class Relay:
    """Passes bytes between the run and the worker. `answered` is called when the worker has sent something, before the
    run gets it. `say_printed` is called at most every `_SAYS_EVERY` seconds."""

    def __init__(
        self,
        run: socket.socket,
        worker: socket.socket,
        say_printed: Callable[[], None],
        answered: Callable[[], None] = lambda: None,
    ):
        self._run, self._worker, self._say_printed, self._answered = run, worker, say_printed, answered
        run.setblocking(False)
        worker.setblocking(False)
        self._to_worker, self._to_run = bytearray(), bytearray()
        self.started = False  # the worker has imported the reward or the environment
        self._broken = False  # the worker has exited, or closed its connection
        self._shut = False
        self._said = 0.0
        self._wanted = 0, 0  # registered poll events of the run's and the worker's connection

    def register(self, poll: "select.poll") -> None:
        """Register both connections with a poll object, for the events that are needed now."""
        wanted = (
            (select.POLLIN if len(self._to_worker) < _MOST_WAITING else 0) | (select.POLLOUT if self._to_run else 0),
            (select.POLLIN if len(self._to_run) < _MOST_WAITING else 0) | (select.POLLOUT if self._to_worker else 0),
        )
        if self._broken:
            wanted = wanted[0], 0
        for connection, events, before in zip((self._run, self._worker), wanted, self._wanted, strict=True):
            if events and events != before:
                poll.register(connection, events)
            elif before and not events:
                poll.unregister(connection)
        self._wanted = wanted

    def turn(self, ready: set[int]) -> bool:
        """Process ready connections. Returns False if the run has closed its connection."""
        if self._run.fileno() in ready and not self._read(self._run, self._to_worker):
            return False
        if self._worker.fileno() in ready and not self._broken:
            self._broken = not self._read(self._worker, self._to_run)
            if self.started:
                self._answered()
            self.started = True
        if self._broken:
            self._to_worker.clear()
        self._send(self._worker, self._to_worker)
        self.flush()
        if self._broken and not self._to_run and not self._shut:
            self._shut = True
            with contextlib.suppress(OSError):
                self._run.shutdown(socket.SHUT_WR)  # tells the run that no more answers come
        if time.monotonic() - self._said >= _SAYS_EVERY:
            self._said = time.monotonic()
            self._say_printed()
        return True

    def _read(self, source: socket.socket, waiting: bytearray) -> bool:
        """Read the available bytes, unless many bytes are waiting already. Returns False if the other side has
        closed."""
        if len(waiting) >= _MOST_WAITING:
            return True
        try:
            portion = source.recv(_PORTION)
        except BlockingIOError:
            return True
        except OSError:
            return False
        waiting += portion
        return bool(portion)

    def _send(self, target: socket.socket, waiting: bytearray) -> None:
        with contextlib.suppress(OSError):
            while waiting:
                del waiting[: target.send(waiting)]

    def flush(self) -> None:
        """Send to the run as far as possible without waiting."""
        self._send(self._run, self._to_run)

    def drain(self) -> None:
        """Read and send the last answers of a worker that has exited."""
        if not self._broken:
            self._read(self._worker, self._to_run)
        self.flush()
