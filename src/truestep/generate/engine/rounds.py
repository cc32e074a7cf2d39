"""Rounds in which sampling ranks exchange requests and completions.

A thread of each rank repeatedly sends the rank's news since the last round to all other ranks, so that no engine waits
for another. Every rank gets the same rounds in the same order. The first round in which all ranks are done or one has
an error is the last one. So no rank waits in a round in which the others do not take part. With a single rank there is
no exchange.
"""

import asyncio
import contextlib
import copy
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from truestep.errors import TruestepError
from truestep.generate.engine.dispatch import Key
from truestep.generate.generator import Completion, Request
from truestep.ranks.group import Ranks

_ROUND_SECONDS = 0.02  # seconds until the next round if this rank has no news
_LAST_SECONDS = 10.0  # seconds that an error waits for other ranks, which may have died, to take part in the last round


@dataclass(frozen=True)
class Asked:
    key: Key
    request: Request
    place: tuple[int, ...]  # the place of the part of the work that asked; empty: another thread asked
    streams: bool  # its tokens are streamed


@dataclass
class News:
    """What a rank sends in a round."""

    asked: list[Asked] = field(default_factory=list)
    cancelled: list[Key] = field(default_factory=list)
    tokens: list[tuple[Key, list[int]]] = field(default_factory=list)  # new tokens of completions that are streamed
    ended: list[tuple[Key, Completion | None]] = field(default_factory=list)  # None: the sending rank itself had asked
    done: bool = False  # the rank's own work is done
    error: BaseException | None = None  # an error of the rank's own work or engine
    settled: int = -1  # see `Waves.settled`

    def add(self, news: "News") -> None:
        self.asked += news.asked
        self.cancelled += news.cancelled
        self.tokens += news.tokens
        self.ended += news.ended
        self.done, self.settled = news.done, news.settled
        self.error = self.error or news.error

    @property
    def urgent(self) -> bool:
        return bool(self.asked or self.cancelled or self.tokens or self.ended or self.done or self.error)


class Rounds:
    """The rounds that this rank has received and not processed yet. Used in one event loop."""

    def __init__(self, ranks: Ranks, changed: asyncio.Event):
        """`changed` is set when a round comes."""
        self._ranks, self._changed, self._loop = ranks, changed, asyncio.get_running_loop()
        self._received: deque[Sequence[News]] = deque()
        self._next = News()  # the news of this rank for the next round
        self._lock = threading.Condition()
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._received)

    def say(self, news: News) -> None:
        """Add news to the next round. The first call begins the rounds."""
        if self._ranks.size == 1:
            self._received.append([news])
            return
        with self._lock:
            news.error = _sendable(news.error)
            self._next.add(news)
            self._lock.notify()
        if self._thread is None:  # a daemon thread, because its exchange never ends if a rank has died
            self._thread = threading.Thread(target=self._exchange, name="sampling-rounds", daemon=True)
            self._thread.start()

    def take(self, count: int) -> list[Sequence[News]]:
        """Take the next rounds. Raise an error if the exchange has failed."""
        if self._failed is not None:
            raise self._failed
        return [self._received.popleft() for _ in range(count)]

    def close(self) -> None:
        """Wait until the rounds have ended. This rank has sent before that it is done, or an error."""
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)

    def _exchange(self) -> None:
        ended = False
        while not ended:
            with self._lock:
                news, self._next = self._next, News(done=self._next.done, settled=self._next.settled)
            try:
                received = self._ranks.gather(news, sampling=True)
            except Exception as error:
                self._put(None, error)
                return
            self._put(received, None)
            ended = all(each.done for each in received) or any(each.error is not None for each in received)
            with self._lock:
                if not ended and not self._next.urgent:
                    self._lock.wait(_ROUND_SECONDS)

    def _put(self, received: Sequence[News] | None, error: Exception | None) -> None:
        def put() -> None:
            self._failed = error
            if received is not None:
                self._received.append(received)
            self._changed.set()

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(put)


def _sendable(error: BaseException | None) -> Exception | None:
    """Return an error that other ranks can read and raise."""
    if error is None:
        return None
    try:
        copy.copy(error)  # another rank makes its copy in the same way
    except Exception:
        return TruestepError(f"{type(error).__name__}: {error}")
    return error if isinstance(error, Exception) else TruestepError(f"another rank ended: {type(error).__name__}")
