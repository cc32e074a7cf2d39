"""The memory that processes take together, also what lies in no process: in files of a file system in memory, in
System V segments and in memory that a descriptor alone keeps. Imports nothing of the rest."""

import contextlib
import os

_PAGE = os.sysconf("SC_PAGE_SIZE")
_BLOCK = 512  # bytes, of st_blocks


def takes_more(limit: int, pids: list[int], private: str | None) -> bool:
    """Tell whether processes take more than `limit` bytes; `private` is a file system in memory that is theirs alone.

    What several processes share is counted once. It costs more to ask, and is asked where the simple sum is too large.
    A PermissionError means that a process of the private namespaces forbids to look: no program does so by chance.
    """
    outside = _in_descriptors(pids, private is not None) + (
        _in_files(private) + _in_segments() if private is not None else 0
    )
    if sum(map(_resident, pids)) + outside <= limit:
        return False
    own, shared = 0, 0
    for pid in pids:
        of_own, of_shared = _proportional(pid)
        own, shared = own + of_own, shared + of_shared
    # A mapped file is in both: what is mapped counts, or what exists, whichever is more.
    return own + max(shared, outside) > limit


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> tuple[int, int]:
    """Give a process's share of its memory, in bytes: what is of processes, and what is of files in memory."""
    counted = {}
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        counted = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Pss")}
    if "Pss" not in counted:  # a process may forbid others to look, and is counted in full
        return _resident(pid), 0
    shared = counted.get("Pss_Shmem", 0)
    return counted["Pss"] - shared, shared


def _in_descriptors(pids: list[int], all_can_be_seen: bool) -> int:
    """Count what lies in files that have no name (memfd_create), each once."""
    found = {}
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                file = f"/proc/{pid}/fd/{name}"
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(file).startswith("/memfd:"):
                        status = os.stat(file)
                        found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK
        except OSError as error:  # it has ended, or forbids to look
            if all_can_be_seen and isinstance(error, PermissionError):
                raise
    return sum(found.values())


def _in_files(folder: str) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _in_segments() -> int:
    """Count the System V segments of this process's namespace."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/sysvipc/shm", encoding="ascii") as file:
        place = file.readline().split().index("rss")
        return sum(int(line.split()[place]) for line in file)
    return 0
