"""Frames: the messages between the run and the processes that call a user's reward. They cannot carry code.

A frame is a JSON object after its length in four bytes. The receiver rejects frames above its limit and anything else.
Imports no other module of truestep, so that processes start fast.
"""

import json
import os
import select
import socket
import time
from typing import Any

HEADER = 4
LARGEST_REQUEST = 2**28  # bytes; a request has a prompt with its fields, and the completion
LARGEST_ANSWER = 2**16
_PORTION = 2**16  # bytes per read
# Bound at import, before a user's code can replace the functions of `json`.
_dumps, _loads = json.dumps, json.loads


class FrameError(Exception):
    """Bytes that are not a valid frame."""


class EndOfFramesError(Exception):
    """The other side has exited or closed the connection."""


class LateError(Exception):
    """No complete frame before the deadline."""


def encode(message: dict[str, Any], limit: int = LARGEST_REQUEST) -> bytes:
    """Return a message as a frame. Raises FrameError if it is too long, TypeError if JSON cannot hold a value."""
    body = _dumps(message).encode()
    if len(body) > limit:
        raise FrameError(f"{len(body)} bytes; at most {limit} can be sent")
    return framed(body)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def length_of(data: bytes | bytearray) -> int | None:
    """Return the length of the first frame in `data`, header included, or None if the header is incomplete."""
    return None if len(data) < HEADER else HEADER + int.from_bytes(data[:HEADER], "big")


def decode(body: bytes) -> dict[str, Any]:
    """Return the message in a frame's body."""
    try:
        message = _loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("not JSON") from error
    if not isinstance(message, dict):
        raise FrameError("not a JSON object")
    return message


class Frames:
    """One end of a connection that carries frames. Owns its socket."""

    def __init__(self, connection: socket.socket, limit: int):
        self._connection, self._limit = connection, limit
        self._buffer = bytearray()
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, frame: bytes, deadline: float | None = None) -> None:
        """Send a frame. `deadline` is a time of time.monotonic."""
        rest = self.send_some(memoryview(frame))
        while rest:
            self._wait(select.POLLOUT, deadline)
            rest = self.send_some(rest)

    def send_some(self, data: memoryview) -> memoryview:
        """Send as many bytes as possible without waiting, and return the rest."""
        while data:
            try:
                data = data[self._connection.send(data) :]
            except BlockingIOError:
                break
            except OSError as error:
                raise EndOfFramesError from error
        return data

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        """Wait for the next frame."""
        while True:
            message = self.take()
            if message is not None:
                return message
            self._wait(select.POLLIN, deadline)
            self.fill()

    def fill(self) -> None:
        """Read up to `_PORTION` available bytes into the buffer."""
        try:
            portion = self._connection.recv(_PORTION)
        except BlockingIOError:
            return
        except OSError as error:
            raise EndOfFramesError from error
        if not portion:
            raise EndOfFramesError
        self._buffer += portion

    def take(self) -> dict[str, Any] | None:
        """Remove a complete frame from the buffer and return its message, or None if there is none yet."""
        body = self.take_body()
        return None if body is None else decode(body)

    def take_body(self) -> bytes | None:
        """Remove a complete frame from the buffer and return its undecoded body, or None if there is none yet."""
        end = length_of(self._buffer)
        if end is None:
            return None
        if end - HEADER > self._limit:
            raise FrameError(f"{end - HEADER} bytes announced; at most {self._limit} are taken")
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER:end])
        del self._buffer[:end]
        return body

    def silent(self) -> bool:
        """Return whether there is no unread data and the other side is connected."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return not self._buffer and not poll.poll(0)

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self._connection, event)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise LateError
            if poll.poll(None if left is None else min(left, 1e6) * 1000 + 1):
                return


def connected() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def from_descriptor(number: int, limit: int) -> Frames:
    """Return frames on a non-inheritable copy of a socket's descriptor, and close the original."""
    copy = os.dup(number)
    os.close(number)
    return Frames(socket.socket(fileno=copy), limit)
