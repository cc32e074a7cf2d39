"""Runs a command, and ends it and all that it started when the process that asked for it is gone.

    python keeper.py PARENT GRACE LOG COMMAND...

A program of its own, which imports nothing of truestep: an engine's processes must not outlive the run, even one that
is killed. PARENT: the process that asked. GRACE: the seconds that they have to end by themselves. On Linux what the
command leaves behind becomes this process's child, whatever session it is in.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl
_POLL_SECONDS = 0.1


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _dies_with_its_parent() -> None:
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _children() -> list[int]:
    """List this process's children, which have those of ended ones among them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
        return [int(number) for number in listed.read().split()]
    return []


def _descendants(process: int) -> list[int]:
    found = [process]
    for number in found:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{number}/task/{number}/children", encoding="ascii") as listed,
        ):
            found += [int(child) for child in listed.read().split()]
    return found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(grace: float) -> None:
    """Ask all descendants to end, and kill those that have not after a while."""
    until = time.monotonic() + grace
    for number in [each for child in _children() for each in _descendants(child)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGTERM)
    while _children():
        if time.monotonic() > until:
            for number in [each for child in _children() for each in _descendants(child)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
        _reap()


def main(parent: str, grace: str, log: str, *command: str) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    _prctl(_SUBREAPER, 1)
    with open(log, "ab") as written:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_dies_with_its_parent,
        )
    while child.poll() is None and not asked and os.getppid() == int(parent):
        time.sleep(_POLL_SECONDS)
    ended = child.poll()
    end_all(float(grace) if ended is None else min(float(grace), 1.0))
    return 0 if ended is None else ended if ended >= 0 else 128 - ended


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
