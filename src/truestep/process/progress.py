"""The progress of this process, and what it waits for, for the watch and the terminal.

The watch ends a run that makes no progress, but never a run that is only slow. So long-running code calls `made`
whenever a part of its work is done, and code that may wait for long names what it waits for with `waiting_for`.
`working` names work and its total, so that the terminal can show its progress.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# If a rank waits for this, it is not the cause of a stall: another rank is.
OTHER_RANKS = "other ranks"

_lock = threading.Lock()
_amounts: dict[str, float] = {}
_last = time.monotonic()
_waits: list[tuple[int, str]] = []  # the waiting thread's id, and what it waits for
_phase = ("", _last)  # the phase's name, and when it began


@dataclass(frozen=True, eq=False)
class Work:
    """Work that this process is doing."""

    name: str  # such as "sampling"
    kind: str  # the kind of progress that counts it, as given to `made`
    total: float | None  # amount to do; None: unknown
    before: float  # the process's amount of that kind when the work began
    since: float  # `time.monotonic` when the work began
    in_main_thread: bool
    tokens_before: float = 0.0  # the process's sampled tokens when the work began

    @property
    def done(self) -> float:
        with _lock:
            return _amounts.get(self.kind, 0) - self.before

    @property
    def tokens(self) -> float:
        """The tokens sampled since the work began."""
        with _lock:
            return _amounts.get("tokens", 0) - self.tokens_before


_works: list[Work] = []


def made(kind: str, amount: float = 1) -> None:
    """Report progress: an additional amount of a kind of work, such as "documents", "tokens" or "bytes written"."""
    global _last
    with _lock:
        _amounts[kind] = _amounts.get(kind, 0) + amount
        _last = time.monotonic()


def phase(name: str) -> None:
    """Begin a phase of the run and report progress; the terminal shows its name."""
    global _phase
    with _lock:
        _phase = (name, time.monotonic())
    made("phases")


def current_phase() -> tuple[str, float]:
    """Return the current phase, and when it began (`time.monotonic`)."""
    with _lock:
        return _phase


def amounts() -> dict[str, float]:
    """Return the total amounts of this process, by kind of work."""
    with _lock:
        return dict(_amounts)


def idle() -> float:
    """Return the seconds since this process last made progress."""
    with _lock:
        return time.monotonic() - _last


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Record what the block waits for. The watch shows it if the run stalls."""
    entry = (threading.get_ident(), what)
    with _lock:
        _waits.append(entry)
    try:
        yield
    finally:
        with _lock:
            _waits.remove(entry)


def waits(thread: int | None = None) -> list[str]:
    """Return what this process, or one of its threads, is waiting for, the innermost wait last."""
    with _lock:
        return [what for waiting, what in _waits if thread is None or waiting == thread]


@contextmanager
def working(name: str, kind: str, total: float | None = None) -> Iterator[None]:
    """Give the block's work a name. `kind`: the kind of progress that counts it, as given to `made`. `total`: the
    amount of work; None: unknown."""
    with _lock:
        main = threading.current_thread() is threading.main_thread()
        work = Work(name, kind, total, _amounts.get(kind, 0), time.monotonic(), main, _amounts.get("tokens", 0))
        _works.append(work)
    try:
        yield
    finally:
        with _lock:
            _works.remove(work)


def works() -> list[Work]:
    """Return the current work of all threads, the innermost last; the main thread's comes last."""
    with _lock:
        return sorted(_works, key=lambda work: work.in_main_thread)
