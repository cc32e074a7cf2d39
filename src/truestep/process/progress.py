"""What this process gets done, and what it waits for: whoever works says so here; the watch and the terminal read it.

A run is ended for making no progress, and never for being slow. So code that may work for long calls `made` whenever a
piece of its work is done, and code that may wait for long names what it waits for with `waiting_for`. Work whose size
is known is named with `working`, so that the terminal can show how far it has come.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Who waits for this does what it should: another rank is the one that stands still.
OTHER_RANKS = "other ranks"

_lock = threading.Lock()
_amounts: dict[str, float] = {}
_last = time.monotonic()
_waits: list[tuple[int, str]] = []  # with the thread that waits
_phase = ("", _last)  # and since when


@dataclass(frozen=True, eq=False)
class Work:
    """Work that this process does now."""

    name: str  # such as "sampling"
    kind: str  # of what is counted: a kind of `made`
    total: float | None  # how much of it there is to do; None: nobody knows
    before: float  # how much of that kind this process had made when the work began
    since: float
    in_main_thread: bool

    @property
    def done(self) -> float:
        with _lock:
            return _amounts.get(self.kind, 0) - self.before


_works: list[Work] = []


def made(kind: str, amount: float = 1) -> None:
    """Report progress: this much more of a kind of work, such as "documents", "tokens" or "bytes written"."""
    global _last
    with _lock:
        _amounts[kind] = _amounts.get(kind, 0) + amount
        _last = time.monotonic()


def phase(name: str) -> None:
    """Name what this process does from now on, for the terminal."""
    global _phase
    with _lock:
        _phase = (name, time.monotonic())
    made("phases")


def current_phase() -> tuple[str, float]:
    """Give what this process does, and since when (`time.monotonic`)."""
    with _lock:
        return _phase


def amounts() -> dict[str, float]:
    """Give the totals of this process, by kind of work."""
    with _lock:
        return dict(_amounts)


def idle() -> float:
    """Give the seconds since this process last made progress."""
    with _lock:
        return time.monotonic() - _last


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Name what the block waits for; the watch shows it if nothing comes."""
    entry = (threading.get_ident(), what)
    with _lock:
        _waits.append(entry)
    try:
        yield
    finally:
        with _lock:
            _waits.remove(entry)


def waits(thread: int | None = None) -> list[str]:
    """Give what this process, or one thread of it, waits for now, the innermost last."""
    with _lock:
        return [what for waiting, what in _waits if thread is None or waiting == thread]


@contextmanager
def working(name: str, kind: str, total: float | None = None) -> Iterator[None]:
    """Name the work of the block: what `made` counts of this kind meanwhile, of so much in all."""
    with _lock:
        main = threading.current_thread() is threading.main_thread()
        work = Work(name, kind, total, _amounts.get(kind, 0), time.monotonic(), main)
        _works.append(work)
    try:
        yield
    finally:
        with _lock:
            _works.remove(work)


def works() -> list[Work]:
    """Give the work in hand, the innermost last; what the main thread does comes behind what other threads do."""
    with _lock:
        return sorted(_works, key=lambda work: work.in_main_thread)
