"""Frames: the messages between the run and the processes that call a user's reward. They cannot carry code.

A frame is four bytes, the length of what follows, and a JSON object. Nothing longer than the reader's limit is kept,
and whatever is no such frame is an error. Imports nothing of the rest, so that a process starts in no time.
"""

import json
import os
import select
import socket
import time
from typing import Any

HEADER = 4
LARGEST_REQUEST = 2**28  # a prompt with its fields, and the completion
LARGEST_ANSWER = 2**16
_PORTION = 2**16
# Taken when this module is first imported: code that replaces the functions of `json` later does not reach these.
_dumps, _loads = json.dumps, json.loads


class FrameError(Exception):
    """Bytes that are no frame."""


class EndOfFramesError(Exception):
    """The other side is gone, or has closed the connection."""


class LateError(Exception):
    """Nothing whole came in time."""


def encode(message: dict[str, Any], limit: int = LARGEST_REQUEST) -> bytes:
    """Make a frame; a FrameError where it would be too long, and a TypeError where JSON has no such value."""
    body = _dumps(message).encode()
    if len(body) > limit:
        raise FrameError(f"{len(body)} bytes; at most {limit} can be sent")
    return framed(body)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "big") + body


def length_of(data: bytes | bytearray) -> int | None:
    """Give the length of the frame that data begins with, its header included; None where that is not known yet."""
    return None if len(data) < HEADER else HEADER + int.from_bytes(data[:HEADER], "big")


def decode(body: bytes) -> dict[str, Any]:
    """Read what stands in a frame."""
    try:
        message = _loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("not JSON") from error
    if not isinstance(message, dict):
        raise FrameError("not a JSON object")
    return message


class Frames:
    """One end of a connection of frames, on a socket that this owns."""

    def __init__(self, connection: socket.socket, limit: int):
        self._connection, self._limit = connection, limit
        self._buffer = bytearray()
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, frame: bytes, deadline: float | None = None) -> None:
        """Send a frame; the time of `deadline` is time.monotonic's."""
        rest = self.send_some(memoryview(frame))
        while rest:
            self._wait(select.POLLOUT, deadline)
            rest = self.send_some(rest)

    def send_some(self, data: memoryview) -> memoryview:
        """Send what can be sent without waiting; give the rest."""
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
        """Read what has come, a portion of it at a time."""
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
        """Take a whole frame out of what was read; None where there is none yet."""
        body = self.take_body()
        return None if body is None else decode(body)

    def take_body(self) -> bytes | None:
        """Take a whole frame as it is."""
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
        """True where nothing has come that was not taken, and the other side is there."""
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
    """Take over a descriptor: a copy that no other program inherits is kept, and the number itself is closed."""
    copy = os.dup(number)
    os.close(number)
    return Frames(socket.socket(fileno=copy), limit)
