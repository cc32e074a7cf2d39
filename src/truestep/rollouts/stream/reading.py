"""A thread that reads messages ahead of the run and parses them, so that a step finds its documents ready.

What it has read is nobody's yet: the run's place moves when a document is taken from here, and what was read ahead is
read again after a restart.
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

MOST_MESSAGES, MOST_BYTES = 4096, 256 * 2**20  # read ahead and not yet taken
_LOOK = 0.25  # seconds that one look for messages waits at most
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts to reach what cannot be reached
_MOST_AT_ONCE, _FEW_BYTES = 64, 4 * 2**20  # of one look
_LAST_LOOK = 2.0  # seconds for a look that is under way to end by itself
_LAST_WAIT = 10.0  # seconds for the thread to end


@dataclass(frozen=True)
class Arrived:
    """A message that was read, and what it holds."""

    message: Message  # without its payload
    outcome: Rollout | BadRecord | None  # None: a blank message
    clock: float  # of the reading, when it came
    size: int = 0  # bytes


def parse_message(message: Message, checks: Checks) -> Rollout | BadRecord | None:
    """Parse one message; give the `BadRecord` that says what is wrong with it, or None where it is blank."""
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
    """The messages of a transport, parsed, in order. The thread starts when the first one is asked for."""

    def __init__(
        self, transport: Transport, checks: Checks, *, most_messages: int = MOST_MESSAGES, most_bytes: int = MOST_BYTES
    ):
        self._transport, self._checks = transport, checks
        self._most_messages, self._most_bytes = most_messages, most_bytes
        self._changed = threading.Condition()
        self._arrived: deque[Arrived] = deque()
        self._bytes = 0
        self._at_once = 1  # messages to ask for: few until it is known how large they are
        self._ended = False
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.clock = 0.0  # seconds of looking for messages: it stands still while nothing can or need be read
        self.trouble: str | None = None  # why nothing can be read now

    def next(self, seconds: float) -> Arrived | None:
        """Give the next message, waiting for so long; None where there is none. What ended the thread is raised here,
        behind the messages that came before it."""
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
        """True if the data has ended and every message of it was given."""
        with self._changed:
            return self._ended and not self._arrived

    @property
    def ahead(self) -> tuple[int, int]:
        """Count the messages that are read and not yet taken, and their bytes."""
        with self._changed:
            return len(self._arrived), self._bytes

    def close(self) -> None:
        """End the thread, wherever it waits.

        A look for messages has a short time to end by itself. A request that is cut off may still be under way: a
        server could carry it out behind all that is said to it later, and give messages to a run that has ended.
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
            self._note_end()  # the checkpoint that the run goes on from may be of the end
            while not self._ended and self._has_room():
                self._read()
                self._note_end()
        except BaseException as error:  # the run's own thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until more may be read; False where the thread is to end."""
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
