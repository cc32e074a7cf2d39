"""The ids of all documents that a run ever received, so that none is trained on twice.

In memory they are digests in many small tables: one is found or added without moving any other. On the disk they are
one file that only grows. A checkpoint holds how long the file was and a digest of that part of it; a restart cuts off
what was written after that, so a kill at any instant leaves a file that fits the last checkpoint.
"""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from truestep.files.whole import sync_directory
from truestep.rollouts.source import SourceError

_DIGEST = 16  # bytes: among ten million ids, two have the same with a chance of 1 in 10^24
_KEPT = _DIGEST - 2  # the first two bytes are the number of the table
_TABLES = 2**16
_BUFFER = 2**16  # bytes that wait to be written


class _Digests:
    """A set of digests: its tables are short, so each is searched from end to end."""

    def __init__(self, content: bytes = b""):
        self._tables = [bytearray() for _ in range(_TABLES)]
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, _DIGEST)
        numbers = rows[:, 0].astype(np.uint32) * 256 + rows[:, 1]
        order = np.argsort(numbers, kind="stable")
        sorted_rows = rows[order, 2:].tobytes()
        ends = np.cumsum(np.bincount(numbers, minlength=_TABLES)) * _KEPT
        start = 0
        for number, end in enumerate(ends.tolist()):
            if end > start:
                self._tables[number] += sorted_rows[start:end]
            start = end

    def add(self, digest: bytes) -> bool:
        """Add a digest; False where it was there."""
        table, kept = self._tables[digest[0] << 8 | digest[1]], digest[2:]
        found = table.find(kept)
        while found >= 0 and found % _KEPT:  # the end of one digest and the beginning of the next
            found = table.find(kept, found + 1)
        if found >= 0:
            return False
        table += kept
        return True


class SeenIds:
    """The set of ids, and its file. Nothing is written before the first id comes."""

    def __init__(self, path: Path):
        self._path = path
        self._digests = _Digests()
        self._hash = blake2b(digest_size=_DIGEST)  # of the file, from its first byte
        self._written = 0  # bytes
        self._waiting = bytearray()  # added and not yet written
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return (self._written + len(self._waiting)) // _DIGEST

    def add(self, identifier: str) -> bool:
        """Add an id; False where it came before."""
        # A file's name, of which a default id is made, need not be valid Unicode.
        digest = blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()
        if not self._digests.add(digest):
            return False
        waiting = self._waiting
        waiting += digest
        if len(waiting) >= _BUFFER:
            self._write()
        return True

    def state(self) -> dict[str, Any]:
        """Put all ids on the disk, and describe the file as a checkpoint holds it."""
        try:
            if self._waiting:
                self._write()
            if self._file is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        return {"count": len(self), "digest": self._hash.hexdigest()}

    def restore(self, state: dict[str, Any]) -> None:
        """Read the ids of a checkpoint, and cut off those that came after it."""
        count = state["count"]
        content = self._read(count * _DIGEST) if count else b""
        checked = blake2b(content, digest_size=_DIGEST)
        if checked.hexdigest() != state["digest"]:
            raise self._damaged("it was changed since, or is of another run")
        self._digests, self._hash, self._written = _Digests(content), checked, len(content)
        self._waiting.clear()
        self._open(len(content))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, size: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(size)
        except OSError as error:
            raise self._damaged(str(error)) from error
        if len(content) < size:
            raise self._damaged(f"it has {len(content):,} bytes, and the checkpoint was made when it had {size:,}")
        return content

    def _open(self, size: int) -> None:
        """Open the file for what comes, with its first `size` bytes and no more."""
        self.close()
        try:
            new = not self._path.exists()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Not opened for appending: a file that is cut below must not lose what it keeps.
            self._file = os.fdopen(
                os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0
            )
            self._file.truncate(size)
            self._file.seek(size)
            if new:
                sync_directory(self._path.parent)
        except OSError as error:
            raise self._unwritable(error) from error

    def _write(self) -> None:
        if self._file is None:
            self._open(0)  # a run that begins: what lies there is of one that was killed before its first checkpoint
        assert self._file is not None
        try:
            while self._waiting:
                size = self._file.write(self._waiting)
                # Hashed many at a time, and only what is in the file: after a full disk both go on from there.
                self._hash.update(self._waiting[:size])
                del self._waiting[:size]
                self._written += size
        except OSError as error:
            raise self._unwritable(error) from error

    def _damaged(self, reason: str) -> SourceError:
        return SourceError(
            f"{self._path}, the ids of the documents that this run has received, does not fit its checkpoint: "
            f"{reason}. Without it a document that is sent again would be trained on again. Put the file back as it "
            "was, remove the newest directories in checkpoints if an older one fits, or begin a new run: another "
            "checkpoint.directory, with this run's last checkpoint as model.path"
        )

    def _unwritable(self, error: OSError) -> SourceError:
        return SourceError(f"{self._path}, the ids of received documents, cannot be written: {error}")
