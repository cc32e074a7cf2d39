"""Finding a process's descendants in /proc and killing them, even if they moved to other sessions or groups.

Imports no other module of truestep. Without /proc no descendants are found, and only process groups can be killed.
"""

import contextlib
import os
import signal
import time

_PAUSE = 0.002


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:  # the process has exited, or the kernel provides no such lists
        return found if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else _searched(pid)
    except OSError:
        return found
    return found


class Children:
    """The children of a single-threaded process. The kernel's list is kept open for frequent reads."""

    def __init__(self, pid: int):
        self._pid = pid
        try:
            self._list: int | None = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel provides no such lists
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
    """Return the fields of /proc/PID/stat after the process's name, which may contain any characters."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def descendants(root: int) -> list[int]:
    """Return the descendants of `root` that have not exited."""
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
    """Return a process's start time, which distinguishes it from a later process with the same PID."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def reap() -> dict[int, int]:
    """Reap all exited children, and return their statuses by PID."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    return statuses


def kill_below(root: int, patience: float = 5.0, spare: frozenset[int] = frozenset()) -> dict[int, int]:
    """Kill all descendants of `root`, except `spare` and its descendants, until none are left.

    Returns the statuses of this process's children that were reaped. Whole process groups are killed at once, so that a
    process that keeps forking cannot outrun the loop.
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
