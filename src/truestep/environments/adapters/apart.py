"""Runs a computation in a separate process, which can be killed."""

import os
import select
import signal
from collections.abc import Callable


def within(seconds: float, compute: Callable[[], bool]) -> bool | None:
    """Run `compute` in a separate process, and return its result; None if it takes longer than `seconds`, or exits. In
    the same process it could not be stopped: one operation on huge numbers may run for hours, and Python handles
    signals only between operations."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, b"1" if compute() else b"0")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], seconds)
        told = os.read(reading, 1) if ready else b""
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None if told == b"" else told == b"1"
