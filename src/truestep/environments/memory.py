"""The memory that a group of processes takes together.

This includes memory outside of any process: files of in-memory file systems, System V segments, and memfd files that
are only held by a descriptor. Imports no other module of truestep.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_PAGE = os.sysconf("SC_PAGE_SIZE")
_BLOCK = 512  # unit of st_blocks in bytes
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
_DESCRIPTORS = 2  # KCMP_FILES
_libc = ctypes.CDLL(None)


def takes_more(limit: int, pids: list[int], private: str | None) -> bool:
    """Return whether processes take more than `limit` bytes. `private` is their own in-memory file system, if any.

    Shared memory counts once. Measuring it costs more, and is done only if the plain sum exceeds the limit. The
    function raises PermissionError if a process of the private namespaces hides its memory, which no program does by
    chance.
    """
    outside = _in_descriptors(pids, private is not None) + outside_processes(private)
    if sum(map(_resident, pids)) + outside <= limit:
        return False
    own, shared = 0, 0
    for pid in pids:
        of_own, of_shared = _proportional(pid)
        own, shared = own + of_own, shared + of_shared
    # Mapped files are in both `shared` and `outside`, so the larger of the two counts.
    return own + max(shared, outside) > limit


def outside_processes(private: str | None) -> int:
    """Return the bytes of files and segments in the private namespaces, if there are any."""
    return 0 if private is None else _in_files(private) + _in_segments()


def memory_of(pid: int) -> int:
    """Return a process's share of memory in bytes, including files in memory that it has open."""
    return sum(_proportional(pid)) + _in_descriptors([pid], False)


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> tuple[int, int]:
    """Return a process's proportional share of memory in bytes: (process memory, files in memory)."""
    counted = {}
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        counted = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Pss")}
    if "Pss" not in counted:  # a process that hides itself is counted in full
        return _resident(pid), 0
    shared = counted.get("Pss_Shmem", 0)
    return counted["Pss"] - shared, shared


def _in_descriptors(pids: list[int], all_can_be_seen: bool) -> int:
    """Return the bytes of open memfd files, each counted once."""
    found = {}
    for pid in pids:
        try:
            for file in _descriptors(pid):
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(file).startswith("/memfd:"):
                        status = os.stat(file)
                        found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK
        except OSError as error:  # the process has exited or hides itself
            if all_can_be_seen and isinstance(error, PermissionError):
                raise
    return sum(found.values())


def _descriptors(pid: int) -> Iterator[str]:
    """Yield the descriptors of a process, and those of its threads that have their own descriptor table."""
    yield from (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    for thread in threads:
        if _SYS_KCMP is not None and _libc.syscall(_SYS_KCMP, pid, thread, _DESCRIPTORS, 0, 0) == 0:
            continue  # the thread uses the process's table
        folder = f"/proc/{pid}/task/{thread}/fd"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            yield from (f"{folder}/{name}" for name in os.listdir(folder))


def _in_files(folder: str) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _in_segments() -> int:
    """Return the resident bytes of the System V segments in this process's namespace."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/sysvipc/shm", encoding="ascii") as file:
        place = file.readline().split().index("rss")
        return sum(int(line.split()[place]) for line in file)
    return 0
