"""Disk errors, with messages that name the file, the disk and the remedy; and paths that are not regular files."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from truestep.errors import TruestepError
from truestep.text import printable

# Errors caused by the disk, not by the program. In errors of write, fsync and close, Python does not name the file.
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
    """A disk error, with its file."""

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
    """Raise disk errors within the block as `DiskError` with this path. `path`: a file, or a directory if several files
    are written."""
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
    """Return the errno of a disk error, or None for other errors. Errors of Rust libraries have it in their message."""
    written = re.search(r"\(os error (\d+)\)$", str(error))
    number = error.errno if isinstance(error, OSError) else int(written[1]) if written else None
    return number if number in _REFUSALS else None


def _sentence(number: int, path: Path) -> str:
    return (
        f"{printable(path)} cannot be written: {_REFUSALS[number]} ({os.strerror(number)}){_disk_of(path)}. Fix that "
        "and start the same command again: complete files are unchanged"
    )


def _disk_of(path: Path) -> str:
    """Describe the disk of a path: its size and free bytes. Return "" if they cannot be read."""
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


_GIVEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # inherited files, which are already open
_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISBLK, "a device"))


def no_file(path: Path) -> str | None:
    """Return the kind of a path that is neither a file nor a directory, else None. Opening a named pipe blocks until
    another process writes to it, and a device may be endless. None also if the path does not exist."""
    if str(path).startswith(_GIVEN):
        return None
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISCHR(mode):
        return None if path.samefile(os.devnull) else "a device"
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)
