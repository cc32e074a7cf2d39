"""What this process gets done, and what it waits for: whoever works says so here, and the watch reads it.

A run is ended for making no progress, and never for being slow. So code that may work for long calls `made` whenever a
piece of its work is done, and code that may wait for long names what it waits for with `waiting_for`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Who waits for this does what it should: another rank is the one that stands still.
OTHER_RANKS = "other ranks"

_lock = threading.Lock()
_amounts: dict[str, float] = {}
_last = time.monotonic()
_waits: list[tuple[int, str]] = []  # with the thread that waits


def made(kind: str, amount: float = 1) -> None:
    """Report progress: this much more of a kind of work, such as "documents", "tokens" or "bytes written"."""
    global _last
    with _lock:
        _amounts[kind] = _amounts.get(kind, 0) + amount
        _last = time.monotonic()


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
