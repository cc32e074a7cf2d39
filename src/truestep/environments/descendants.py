"""Processes below a process: found in /proc, and ended whatever session or group they moved themselves to.

Imports nothing of the rest. Where there is no /proc nothing is found, and what is left is the end of process groups.
"""

import contextlib
import os
import signal
import time

_PAUSE = 0.002


def children_of(pid: int) -> list[int]:
    """Find the children of a process, those of all its threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:  # the process is gone, or the kernel keeps no such lists
        return found if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else _searched(pid)
    except OSError:
        return found
    return found


class Children:
    """The children of a process of one thread, asked for often: the kernel's list of them is kept open."""

    def __init__(self, pid: int):
        self._pid = pid
        try:
            self._list: int | None = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel keeps no such lists
            self._list = None

    def now(self) -> list[int]:
        if self._list is not None:
            with contextlib.suppress(OSError):
                return [int(word) for word in os.pread(self._list, 2**16, 0).split()]
        return children_of(self._pid)


def _searched(parent: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (fields := _stat(int(name))) and int(fields[1]) == parent:
                found.append(int(name))
    return found


def _stat(pid: int) -> list[str] | None:
    """Read a process's state from /proc, from its third field on: its name before may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def descendants(root: int) -> list[int]:
    """Find the processes below `root` that have not ended."""
    found, parents = [], [root]
    while parents:
        for child in children_of(parents.pop()):
            fields = _stat(child)
            if fields is None:
                continue
            parents.append(child)
            if fields[0] not in "ZX":
                found.append(child)
    return found


def started(pid: int) -> str | None:
    """Tell one process from a later one of the same number: by when it started."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def reap() -> dict[int, int]:
    """Take note of every child that has ended; give their statuses."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    return statuses


def kill_below(root: int, patience: float = 5.0, spare: frozenset[int] = frozenset()) -> dict[int, int]:
    """Kill everything below `root` until there is nothing left, but for `spare` and what is below that; give the
    statuses of those that were children of this process.

    A whole group dies at once, so that one which forks without end cannot outrun it.
    """
    statuses: dict[int, int] = {}
    own = os.getpgid(0)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if root == os.getpid():
            statuses |= reap()
        kept = set(spare).union(*(descendants(pid) for pid in spare))
        found = [pid for pid in descendants(root) if pid not in kept]
        if not found:
            break
        kept_groups = {own, *(group for pid in kept if (group := _group(pid)) is not None)}
        for group in {_group(pid) for pid in found} - kept_groups:
            if group is not None:
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)
    return statuses | reap() if root == os.getpid() else statuses


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None
