"""A file of a watched directory: how far it was read, and whether another file has replaced it.

Names, sizes and inodes are reused, so the content decides: it is the same file if it begins with exactly the bytes that
were read. A file that has grown is first compared only in the last bytes that were read. After any other change, and
once the file has been unchanged for a while, it is compared from its beginning.
"""

import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

from truestep.files import bounded

_DIGEST = 16  # bytes
_TAIL = 2**16  # bytes
_PIECE = 2**20  # bytes
_LEFT_ALONE = 2.0  # seconds; some file systems have timestamps this coarse


class Seen(NamedTuple):
    """A file's metadata. A difference in any field means that it may be another file."""

    inode: int
    size: int
    modified: int
    changed: int


@dataclass(frozen=True)
class Read:
    """The part of a file that was read."""

    lines: int = 0
    size: int = 0  # bytes
    digest: str | None = None  # digest of these bytes; None in checkpoints of older versions


class WatchedFile:
    def __init__(self, read: Read):
        self.read = read
        self.seen: Seen | None = None  # metadata at the last comparison
        self.unfinished = False  # the last line has no line break
        self._hash = _new_hash()  # hash of the bytes that were read
        self._tail = b""  # digest of the last `_TAIL` bytes that were read
        self._since = 0.0  # time when `seen` last changed
        self._settled = False  # compared from its beginning after it was unchanged for `_LEFT_ALONE` seconds

    def has_news(self, seen: Seen, ends: bool) -> bool:
        """Return whether the file must be opened. `ends`: the data has ended, so no line is still being written."""
        more = seen.size > self.read.size and (ends or not self.unfinished)
        return seen != self.seen or more or (not self._settled and self._is_left_alone(ends))

    def _is_left_alone(self, ends: bool) -> bool:
        return ends or time.monotonic() - self._since >= _LEFT_ALONE

    def goes_on(self, file: BinaryIO, seen: Seen, ends: bool, interrupted: Callable[[], bool]) -> bool | None:
        """Return whether the file begins with the bytes that were read.

        False: it is another file, to be read from its beginning. None: the comparison was interrupted.
        """
        before = self.seen
        if seen != before:
            self.seen, self._since, self._settled, self.unfinished = seen, time.monotonic(), False, False
        appended = before is not None and seen.inode == before.inode and seen.size > self.read.size
        if appended and not (seen == before and self._is_left_alone(ends)):
            if self._tail_of(file) == self._tail and self._at_a_lines_end(file):
                return True
        elif (same := self._begins_with_it(file, seen.size, interrupted)) is not False:
            self._settled = same is not None and self._is_left_alone(ends)
            if same is None:
                self.seen = before
            return same
        self.read, self._hash = Read(), _new_hash()
        self._tail = self._tail_of(file)
        return False

    def _begins_with_it(self, file: BinaryIO, size: int, interrupted: Callable[[], bool]) -> bool | None:
        read, found = self.read, _new_hash()
        if size < read.size:
            return False
        file.seek(0)
        left = read.size
        while left:
            if interrupted():
                return None
            piece = file.read(min(_PIECE, left))
            if not piece:
                return False
            found.update(piece)
            left -= len(piece)
        if read.digest is not None and found.hexdigest() != read.digest:
            return False
        self._hash, self._tail = found, self._tail_of(file)
        return self._at_a_lines_end(file)

    def _at_a_lines_end(self, file: BinaryIO) -> bool:
        """Return whether the part that was read ends at a line's end.

        False if a last line that was read without a line break has grown since.
        """
        file.seek(max(self.read.size - 1, 0))
        around = file.read(2)
        return self.read.size == 0 or around[:1] == b"\n" or (self.read.digest is not None and around[1:] in b"\n")

    def _tail_of(self, file: BinaryIO) -> bytes:
        start = max(self.read.size - _TAIL, 0)
        file.seek(start)
        return blake2b(file.read(self.read.size - start), digest_size=_DIGEST).digest()

    def lines(self, file: BinaryIO, count: int, ends: bool) -> list[tuple[bytes | None, Read]]:
        """Read at most `count` further lines. Returns each line (None if it is too long) with the part read by then."""
        file.seek(self.read.size)
        found: list[tuple[bytes | None, Read]] = []
        while len(found) < count:
            hashed = self._hash.copy()
            line, length, whole = bounded.read_line(file, hashed.update)
            if not length:
                break
            if not whole and not ends:
                self.unfinished = True
                break
            self._hash = hashed
            self.read = Read(self.read.lines + 1, self.read.size + length, hashed.hexdigest())
            found.append((line, self.read))
        self._tail = self._tail_of(file)
        return found


def _new_hash() -> blake2b:
    return blake2b(digest_size=_DIGEST)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file. Raises OSError for anything else, such as a pipe, which would block forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no longer a file")
    return file
