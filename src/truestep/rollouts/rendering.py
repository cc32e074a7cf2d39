"""A limit on the time and memory of chat templates.

Templates are programs that come with a model. Jinja's sandbox does not limit how long they run.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truestep.files.bounded import MIB

_SECONDS = 60.0
_MEMORY = 2048 * MIB  # limit of the process's growth while a template renders
_LOOK = 0.05  # seconds between checks
_STATM = Path("/proc/self/statm")


class TemplateStoppedError(Exception):
    """A chat template that ran for too long or took too much memory."""


def within_bounds(render: Callable[[], Any]) -> Any:
    """Call `render`, and raise `TemplateStoppedError` when it exceeds the limits.

    The exception arrives between bytecodes, so a single long C call is not interrupted.
    """
    watch, stopped = _Watch(threading.get_ident()), False
    try:
        try:
            result = render()
        except TemplateStoppedError:
            stopped = True
        finally:
            # The exception was sent but not yet raised: catch it here, so that no caller gets it.
            if watch.end() and not stopped:
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
    """A thread that raises `TemplateStoppedError` in the watched thread when a limit is exceeded."""

    def __init__(self, thread: int):
        self._watched, self._done, self._stopped = thread, threading.Event(), False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="template", daemon=True)
        self._thread.start()

    def end(self) -> bool:
        """Stop watching, and return whether the exception was sent."""
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
