"""The limits that a supervisor enforces on its worker and on all descendants of the worker."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from truestep.environments.descendants import children_of, descendants, kill_below
from truestep.environments.memory import memory_of, outside_processes, takes_more

MOST_PROCESSES = 256  # limit of a supervisor's descendants
_OF_AN_EPISODE = 16  # additional processes for each episode
_TICK = 0.1  # seconds between checks
_SHARE = 0.1  # the largest share of the time that checks may take
_SOON = 10.0  # seconds to wait until a killed process has exited


class Pace:
    """Limits how often a check is made: every `_TICK` seconds, or less often if it would take more than `_SHARE` of the
    time."""

    def __init__(self) -> None:
        self._next = 0.0

    def made(self, check: Callable[[], str | None]) -> str | None:
        """Run the check if it is due, and return its result. Otherwise return None."""
        since = time.monotonic()
        if since < self._next:
            return None
        result = check()
        now = time.monotonic()
        self._next = now + max(_TICK, (now - since) / _SHARE)
        return result


class Limits:
    """Limits of a worker that ends when it exceeds them."""

    def __init__(self, what: str, memory: int, private: str | None):
        """`what` is what the worker runs, for messages; `memory` is in bytes; `private` is the worker's own in-memory
        file system, or None if it is not isolated."""
        self.what, self.memory, self.private = what, memory, private
        self._of_processes, self._of_memory = Pace(), Pace()

    def breach(self, started: bool) -> str | None:
        """Return the limit that all descendants together exceed, as a message, or None.

        Until the worker has `started`, its memory may be unreadable (`isolation.hide`), as is that of the supervisor
        from which it was forked.
        """
        return self._of_processes.made(self._count) or self._of_memory.made(lambda: self._measure(started))

    def _count(self) -> str | None:
        most = self._most_processes()
        return self._too_many(most) if len(descendants(os.getpid())) > most else None

    def _measure(self, started: bool) -> str | None:
        try:
            too_large = takes_more(self.memory, descendants(os.getpid()), self.private)
        except PermissionError:
            return f"the {self.what} does not allow its memory to be measured" if started else None
        return self._too_large() if too_large else None

    def _most_processes(self) -> int:
        return MOST_PROCESSES

    def _too_many(self, most: int) -> str | None:
        return f"the {self.what} started more than {most} processes"

    def _too_large(self) -> str | None:
        return f"the {self.what} took more than {self.memory / 2**30:.3g} GiB of memory"


class EpisodeLimits(Limits):
    """Limits of a worker that forks a process for each episode. At a limit, the largest episode is killed, if that is
    enough."""

    def __init__(self, what: str, memory: int, private: str | None, worker: int, say: Callable[[dict[str, Any]], None]):
        """`say` tells the run which process will be killed, and why. It is called before the kill."""
        super().__init__(what, memory, private)
        self._worker, self._say = worker, say

    def _most_processes(self) -> int:
        return MOST_PROCESSES + _OF_AN_EPISODE * len(children_of(self._worker))

    def _too_many(self, most: int) -> str | None:
        found = {pid: len(descendants(pid)) for pid in children_of(self._worker)}
        reason = f"the {self.what}'s episodes in one process started more than {most} processes, this episode the most"
        return self._kill_largest(found, reason) if found else reason

    def _too_large(self) -> str | None:
        reason = super()._too_large() or ""
        if outside_processes(self.private) > self.memory / 2:  # killing an episode would not remove its files
            return f"{reason}, most of it in files"
        found = {pid: sum(map(memory_of, [pid, *descendants(pid)])) for pid in children_of(self._worker)}
        if not found or max(found.values()) < memory_of(self._worker):
            return reason
        if max(found.values()) < self.memory / 2:
            size = f"{self.memory / 2**30:.3g} GiB of memory"
            reason = f"the {self.what}'s episodes in one process together took more than {size}, this episode the most"
        return self._kill_largest(found, reason)

    def _kill_largest(self, found: dict[int, int], reason: str) -> str | None:
        """Kill the largest child of the worker and all its descendants. Returns the reason if it does not die."""
        largest = max(found, key=lambda pid: found[pid])
        self._say({"killed": largest, "reason": reason})
        with contextlib.suppress(OSError):
            os.kill(largest, signal.SIGSTOP)  # so that it cannot start processes meanwhile
            kill_below(largest, _SOON)
            os.kill(largest, signal.SIGKILL)
        deadline = time.monotonic() + _SOON
        while largest in descendants(self._worker):
            if time.monotonic() > deadline:
                return reason
            time.sleep(0.005)
        return None
