"""Runs a command. When the process that asked for it has exited, ends the command and all its descendants.

    python keeper.py PARENT GRACE LOG COMMAND...

This is a separate program, which imports nothing of truestep, because an engine's processes must end even if the run is
killed. PARENT: the id of the process that asked. GRACE: the seconds that the processes have to end by themselves. On
Linux, orphaned descendants of the command become children of this process, whatever session they are in.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # options of prctl
_POLL_SECONDS = 0.1


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _dies_with_its_parent() -> None:
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _children() -> list[int]:
    """List this process's children, including the orphans that it has adopted."""
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
    """Ask all descendants to end. Kill those that have not ended after `grace` seconds."""
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
