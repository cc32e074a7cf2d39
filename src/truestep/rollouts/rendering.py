"""A ceiling on chat templates: programs that come with a model, in a sandbox that lets them run for ever."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truestep.files.bounded import MIB

_SECONDS = 60.0
_MEMORY = 2048 * MIB  # that the process may grow by meanwhile
_LOOK = 0.05  # seconds
_STATM = Path("/proc/self/statm")


class TemplateStoppedError(Exception):
    """A chat template ran for too long, or took too much memory."""


def within_bounds(render: Callable[[], Any]) -> Any:
    """Call what renders a chat template, and stop it where it goes on without end. A single operation is not stopped
    in its middle."""
    watch, stopped = _Watch(threading.get_ident()), False
    try:
        try:
            result = render()
        except TemplateStoppedError:
            stopped = True
        finally:
            if watch.end() and not stopped:  # the exception is under way, and must not come to anybody else
                time.sleep(_LOOK)
                for _ in range(1000):
                    time.sleep(0)
    except TemplateStoppedError:
        stopped = True
    if stopped:
        raise TemplateStoppedError(
            f"it was stopped: a chat template may run for {_SECONDS:g} s and take {_MEMORY // MIB} MiB"
        )
    return result


class _Watch:
    """A thread that raises an exception in another where that takes too long."""

    def __init__(self, thread: int):
        self._watched, self._done, self._stopped = thread, threading.Event(), False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="template", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """Stop watching; true if the exception was sent."""
        with self._lock:
            self._done.set()
            return self._stopped

    def _run(self) -> None:
        end, most = time.monotonic() + _SECONDS, _resident() + _MEMORY
        while not self._done.wait(_LOOK):
            if time.monotonic() < end and _resident() < most:
                continue
            with self._lock:
                if not self._done.is_set():
                    self._stopped = True
                    exception = ctypes.py_object(TemplateStoppedError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), exception)
            return


def _resident() -> int:
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return 0
