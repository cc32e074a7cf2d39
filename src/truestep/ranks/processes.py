"""The state of a process by the operating system: whether it is alive, and whether it computes, reads or writes.

This is read from /proc on Linux. On other systems only this process's own CPU time is known.
"""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
# A thread computes if it runs for this fraction of the time in which it does not wait for a CPU. Threads that only poll
# run for about a hundredth of the time.
_COMPUTES = 0.2
_LEAST_SECONDS = 0.01
_STARVES = 0.5  # a main thread that waits for a CPU for this fraction of the time is slow, not stuck
_BYTES_A_SECOND = 65536  # a process that reads and writes more than this works; logs and the watch's reads are less
_EXITING = 0x4  # flag PF_EXITING of a process: exiting may take seconds on a busy machine


@dataclass(frozen=True)
class Identity:
    """A process of some machine. Its start time distinguishes it from a later process with the same id."""

    machine: str
    number: int
    started: int

    @staticmethod
    def own() -> "Identity":
        number = os.getpid()
        fields = _stat(number)
        return Identity(machine(), number, int(fields[19]) if fields else 0)

    def look(self) -> Literal["there", "stopped", "gone", "unknown"]:
        """Return the process's state; `unknown` if it is on another machine."""
        if not self.started or self.machine != machine():
            return "unknown"
        fields = _stat(self.number)
        if not fields or int(fields[19]) != self.started or fields[0] in ("Z", "X") or int(fields[6]) & _EXITING:
            return "gone"
        return "stopped" if fields[0] in ("T", "t") else "there"


def machine() -> str:
    """Return an id of the machine's boot and PID namespace, within which process ids are unique; "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _stat(process: int, thread: int | None = None) -> list[str]:
    """Return the fields of /proc/PID/stat of a process or thread, from the state on; empty if it does not exist."""
    folder = _PROC / str(process)
    try:
        line = ((folder if thread is None else folder / "task" / str(thread)) / "stat").read_text()
    except OSError:
        return []
    return line.rpartition(")")[2].split()


@dataclass(frozen=True)
class _Thread:
    ran: float  # seconds
    queued: float  # seconds that it was ready to run and waited for a CPU


@dataclass(frozen=True)
class _Sample:
    at: float
    threads: dict[tuple[int, int], _Thread] = field(default_factory=dict)  # of the process and its children
    own: frozenset[tuple[int, int]] = frozenset()  # those of `threads` that are the process's own
    bytes: int = 0


class Activity:
    """The activity of a process and its children, between one call and the next."""

    def __init__(self, process: int | None = None):
        self._process = process or os.getpid()
        self._mine = process is None
        self._before = self._sample()

    def since_last(self, *, own_computing: bool = True) -> dict[str, float]:
        """Return the seconds of computing and the bytes read or written since the last call. Amounts so small that a
        process may have them while it only waits are left out. `own_computing` False: only computing of its children
        counts, because a process that waits for a device or for other ranks may spin."""
        before, now = self._before, self._sample()
        self._before = now
        elapsed = now.at - before.at
        found = {}
        computed = 0.0
        for thread, state in now.threads.items():
            first = before.threads.get(thread, _Thread(0.0, 0.0))
            ran = state.ran - first.ran
            free = max(elapsed - (state.queued - first.queued), ran)
            if ran >= max(_LEAST_SECONDS, _COMPUTES * free) and (own_computing or thread not in now.own):
                computed += ran
        if computed:
            found["seconds of computing"] = computed
        queued = _queued(now, self._process) - _queued(before, self._process)
        if own_computing and elapsed and queued >= _STARVES * elapsed:
            found["seconds ready to run"] = queued
        moved = now.bytes - before.bytes
        if moved > _BYTES_A_SECOND * max(1.0, elapsed):
            found["bytes read or written"] = float(moved)
        return found

    def _sample(self) -> _Sample:
        at = time.monotonic()
        if not (_PROC / str(self._process)).is_dir():
            # Without /proc: one entry for all threads.
            ran = time.process_time() if self._mine else 0.0
            key = (self._process, 0)
            return _Sample(at, {key: _Thread(ran, 0.0)}, frozenset([key]))
        own = _threads(self._process)
        if self._mine:
            own.pop((self._process, threading.get_native_id()), None)  # the watch's thread
        below = {key: state for child in _children(self._process) for key, state in _threads(child).items()}
        return _Sample(at, own | below, frozenset(own), _bytes(self._process))


def _queued(sample: _Sample, process: int) -> float:
    return sample.threads.get((process, process), _Thread(0.0, 0.0)).queued


def _threads(process: int) -> dict[tuple[int, int], _Thread]:
    found = {}
    try:
        numbers = [int(name) for name in os.listdir(_PROC / str(process) / "task")]
    except OSError:
        return {}
    for number in numbers:
        try:
            ran, queued, _ = (_PROC / str(process) / "task" / str(number) / "schedstat").read_text().split()
            found[process, number] = _Thread(int(ran) / 1e9, int(queued) / 1e9)
        except (OSError, ValueError):  # a kernel without it, or a thread that has just ended
            fields = _stat(process, number)
            if fields:
                found[process, number] = _Thread((int(fields[11]) + int(fields[12])) / _TICKS, 0.0)
    return found


def _children(process: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir(_PROC):
        if name.isdigit() and (fields := _stat(int(name))):
            parents.setdefault(int(fields[1]), []).append(int(name))
    found, look = [], [process]
    while look:
        below = parents.get(look.pop(), [])
        found += below
        look += below
    return found


def _bytes(process: int) -> int:
    """Return the bytes that a process has read and written: by system calls, and from disk by mapped files."""
    try:
        lines = (_PROC / str(process) / "io").read_text().splitlines()
    except OSError:
        return 0
    counted = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
    return counted.get("rchar", 0) + counted.get("wchar", 0) + counted.get("read_bytes", 0)


def machine_memory() -> int:
    """Return the memory of the machine in bytes, or the limit of this process's container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # there is no container, or it has no limit
        return total


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
