"""A thread that reads and parses messages ahead of the run, so that a step finds its documents ready.

The run's place in the stream moves only when a message is taken from here. A restart reads all later messages again.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass, replace

from truestep.files import bounded
from truestep.rollouts.files import parse_json, readable
from truestep.rollouts.record import BadRecord, Checks, parse_record
from truestep.rollouts.stream.transport import Message, Transport, TransportError
from truestep.types import Rollout

MOST_MESSAGES, MOST_BYTES = 4096, 256 * 2**20  # limits of messages read ahead and not yet taken
_LOOK = 0.25  # seconds that a fetch waits at most
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts after a `TransportError`
_MOST_AT_ONCE, _FEW_BYTES = 64, 4 * 2**20  # messages per fetch; fewer if they are larger than `_FEW_BYTES` together
_LAST_LOOK = 2.0  # seconds that `close` waits for a fetch to return before it interrupts the fetch
_LAST_WAIT = 10.0  # seconds that `close` then waits for the thread


@dataclass(frozen=True)
class Arrived:
    """A message that was read, with its parsed document or error."""

    message: Message  # without its payload
    outcome: Rollout | BadRecord | None  # None: a blank message
    clock: float  # `Reading.clock` on arrival
    size: int = 0  # bytes


def parse_message(message: Message, checks: Checks) -> Rollout | BadRecord | None:
    """Return the document of a message, a `BadRecord` if the message is invalid, or None if it is blank."""
    if message.blank:
        return None
    if message.problem is not None:
        return BadRecord(message.problem)
    if len(message.payload) > bounded.RECORD:
        return BadRecord(f"the record is not read: {bounded.too_long()}")
    try:
        return parse_record(readable(parse_json(message.payload)), message.where, checks)
    except BadRecord as error:
        return error


class Reading:
    """The parsed messages of a transport, in order. The first call of `next` starts the thread."""

    def __init__(
        self, transport: Transport, checks: Checks, *, most_messages: int = MOST_MESSAGES, most_bytes: int = MOST_BYTES
    ):
        self._transport, self._checks = transport, checks
        self._most_messages, self._most_bytes = most_messages, most_bytes
        self._changed = threading.Condition()
        self._arrived: deque[Arrived] = deque()
        self._bytes = 0
        self._at_once = 1  # messages per fetch, adapted to their size
        self._ended = False
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.clock = 0.0  # seconds spent in fetches; stops while the transport is unreachable or enough is read ahead
        self.trouble: str | None = None  # error of the transport, if it cannot be read now

    def next(self, seconds: float) -> Arrived | None:
        """Return the next message, or None if none comes within `seconds`.

        An exception of the thread is raised here, after the messages that came before it.
        """
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
                self._thread.start()
            if not self._arrived and not self._ended and self._error is None:
                self._changed.wait(seconds)
            if self._arrived:
                first = self._arrived.popleft()
                self._bytes -= first.size
                self._changed.notify_all()
                return first
            if self._error is not None:
                raise self._error
            return None

    @property
    def ended(self) -> bool:
        """True if the data has ended and every message was returned."""
        with self._changed:
            return self._ended and not self._arrived

    @property
    def ahead(self) -> tuple[int, int]:
        """The number and bytes of messages that are read and not yet taken."""
        with self._changed:
            return len(self._arrived), self._bytes

    def close(self) -> None:
        """End the thread.

        A fetch first gets a short time to return, and is then interrupted. An interrupted request can still be executed
        by the server after later requests, which would deliver messages to a run that has ended.
        """
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(_LAST_LOOK)
        if self._thread.is_alive():
            self._transport.interrupt()
            self._thread.join(_LAST_WAIT)

    def _run(self) -> None:
        try:
            self._note_end()  # the checkpoint may have been made after the end of the data
            while not self._ended and self._has_room():
                self._read()
                self._note_end()
        except BaseException as error:  # raised by `next` in the main thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until the limits allow reading. Returns False if the thread should end."""
        with self._changed:
            while not self._closing.is_set() and (
                len(self._arrived) >= self._most_messages or self._bytes >= self._most_bytes
            ):
                self._changed.wait()
        return not self._closing.is_set()

    def _read(self) -> None:
        pause, began = _FIRST_PAUSE, time.monotonic()
        while True:
            try:
                messages = self._transport.fetch(self._at_once, _LOOK)
                break
            except TransportError as error:
                self.trouble = str(error)
                if self._closing.wait(pause):
                    return
                pause, began = min(2 * pause, _LONGEST_PAUSE), time.monotonic()
        self.trouble = None
        with self._changed:
            self.clock += time.monotonic() - began
        size = sum(len(message.payload) for message in messages)
        few = size < _FEW_BYTES
        self._at_once = min(2 * self._at_once, _MOST_AT_ONCE) if few else max(1, self._at_once // 4)
        for message in messages:
            if self._closing.is_set():
                return
            self._add(message)

    def _note_end(self) -> None:
        if self._transport.ended:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _add(self, message: Message) -> None:
        outcome = parse_message(message, self._checks)
        arrived = Arrived(replace(message, payload=b""), outcome, self.clock, len(message.payload))
        with self._changed:
            self._arrived.append(arrived)
            self._bytes += arrived.size
            self._changed.notify_all()
