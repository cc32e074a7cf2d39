"""What stays until a run ends is put where Python's garbage collector does not look.

A full collection looks at every object, and a process with torch, transformers and compiled layers has a million of
them: it takes a quarter of a second and more, every ten or twenty steps, on each rank at another time, and all others
wait for it. Almost all of these objects are there from the first steps on.
"""

import gc

_AFTER = (10, 100)  # steps of a process: by then code is compiled, and a save or an evaluation was made


class LongLived:
    """The objects that a run does not give up before its end."""

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
        """Have the collector look at them again: the run has ended, and the process may go on."""
        if self._put_aside:
            gc.unfreeze()
            self._put_aside = False
