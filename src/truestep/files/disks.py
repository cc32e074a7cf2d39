"""What a disk refuses, as one sentence: which file, which disk, and what to do; and paths that are no files to read."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from truestep.errors import TruestepError
from truestep.text import printable

# What a disk says whatever the program did. Its own calls (a write, a sync, a close) name no file.
_REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota on this disk is used up",
    errno.EFBIG: "the file would be larger than this process or its file system may make one (ulimit -f)",
    errno.EROFS: "the file system is mounted read-only",
    errno.EIO: "the disk failed (input/output error)",
    errno.ENXIO: "the disk is gone",
    errno.ENODEV: "the disk is gone",
    errno.ESTALE: "the network's disk no longer knows it",
}


class DiskError(TruestepError, OSError):
    """A disk's refusal, with the file that it is about."""

    sentence: str = ""

    @staticmethod
    def of(number: int, path: Path) -> "DiskError":
        made = DiskError(number, os.strerror(number), os.fspath(path))
        made.sentence = _sentence(number, path)
        return made

    def __str__(self) -> str:
        return self.sentence or super().__str__()


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a file, or the directory of several, in whatever a disk refuses while it is written."""
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        number, place = refusal(error), Path(path)
        if number is None:
            raise
        named = getattr(error, "filename", None)
        raise DiskError.of(number, Path(os.fsdecode(named)) if named and place.is_dir() else place) from error


def refusal(error: Exception) -> int | None:
    """Give the number of a disk's refusal; None for other errors. Libraries in Rust write it into their message."""
    written = re.search(r"\(os error (\d+)\)$", str(error))
    number = error.errno if isinstance(error, OSError) else int(written[1]) if written else None
    return number if number in _REFUSALS else None


def _sentence(number: int, path: Path) -> str:
    return (
        f"{printable(path)} cannot be written: {_REFUSALS[number]} ({os.strerror(number)}){_disk_of(path)}. Mend that "
        "and start the same command again: what was complete before is as it was"
    )


def _disk_of(path: Path) -> str:
    """Describe the disk of a path, as far as it can be looked at."""
    place = path.absolute()
    try:
        while not place.exists():
            place = place.parent
        facts = os.statvfs(place)
        while not place.is_mount():
            place = place.parent
    except OSError:
        return ""
    free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    inodes = "" if facts.f_favail or not facts.f_files else ", and no further file fits on it"
    return f"; of the {size:,} bytes at {printable(place)}, {free:,} are free now{inodes}"


_GIVEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # what this process was given is open already
_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"))


def no_file(path: Path) -> str | None:
    """Say what a path is that is neither a file nor a directory: to open a named pipe takes until somebody writes to
    it, and a device may have no end. None for all others, and for what is not there."""
    if str(path).startswith(_GIVEN):
        return None
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISCHR(mode):
        return None if path.samefile(os.devnull) else "a device"
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)
