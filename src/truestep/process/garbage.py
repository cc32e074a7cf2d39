"""Freezes long-lived objects, so that Python's garbage collector does not visit them.

A full collection visits every object, and a process with torch, transformers and compiled layers has a million. It
takes a quarter of a second or more, every ten or twenty steps. It runs at a different time on each rank, and all other
ranks wait for it. Almost all of these objects exist from the first steps on.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_AFTER = (10, 100)  # objects are frozen after these steps: by then code is compiled, and a save or evaluation has run


class LongLived:
    """Freezes the objects that live until the run ends."""

    def __init__(self) -> None:
        self._steps = 0
        self._put_aside = False

    def step_made(self) -> None:
        self._steps += 1
        if self._steps in _AFTER:
            gc.collect()
            gc.freeze()
            self._put_aside = True

    def give_back(self) -> None:
        """Unfreeze the objects at the end of a run, since the process may go on."""
        if self._put_aside:
            gc.unfreeze()
            self._put_aside = False


@contextmanager
def importing() -> Iterator[None]:
    """Import torch and transformers inside the block without collections, which would take a fifth of the time. A
    process that has imported torch before is left as it is."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()  # no freeze: Triton's bindings report objects that are frozen at a process's end as leaks
