"""The ids of all documents that a run ever received, so that no document is trained on twice.

In memory, ids are digests in many small tables, so that lookups and additions stay fast. On disk they are an
append-only file. A checkpoint holds the file's length and a digest of its content. A restart truncates the file to that
length, so the file fits the last checkpoint after a kill at any instant.
"""

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from truestep.files.whole import sync_directory
from truestep.rollouts.source import SourceError

_DIGEST = 16  # bytes; among ten million ids the chance of a collision is 1 in 10^24
_KEPT = _DIGEST - 2  # bytes stored; the first two are the table's number
_TABLES = 2**16
_BUFFER = 2**16  # bytes buffered before a write


class _Digests:
    """A set of digests, as a hash table of byte strings that are searched linearly."""

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

    def __contains__(self, digest: bytes) -> bool:
        table, kept = self._tables[digest[0] << 8 | digest[1]], digest[2:]
        found = table.find(kept)
        while found >= 0 and found % _KEPT:  # an unaligned match, across two digests
            found = table.find(kept, found + 1)
        return found >= 0

    def add(self, digest: bytes) -> bool:
        """Add a digest. Returns False if the set has it already."""
        if digest in self:
            return False
        self._tables[digest[0] << 8 | digest[1]] += digest[2:]
        return True


def _digest_of(identifier: str) -> bytes:
    # A default id contains a file's name, which may be invalid Unicode.
    return blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()


class SeenIds:
    """The set of ids and its file. The file is created when the first ids are written."""

    def __init__(self, path: Path, fence: Callable[[], None] = lambda: None):
        """`fence` raises if another process writes the run."""
        self._path, self._fence = path, fence
        self._digests = _Digests()
        self._hash = blake2b(digest_size=_DIGEST)  # hash of the written bytes of the file
        self._written = 0  # bytes
        self._waiting = bytearray()  # digests that are not yet written
        self._file: BinaryIO | None = None

    def __len__(self) -> int:
        return (self._written + len(self._waiting)) // _DIGEST

    def __contains__(self, identifier: str) -> bool:
        return _digest_of(identifier) in self._digests

    def add(self, identifier: str) -> bool:
        """Add an id. Returns False if the id came before."""
        digest = _digest_of(identifier)
        if not self._digests.add(digest):
            return False
        waiting = self._waiting
        waiting += digest
        if len(waiting) >= _BUFFER:
            self._write()
        return True

    def state(self) -> dict[str, Any]:
        """Write and sync all ids, and return the file's length and digest for a checkpoint."""
        try:
            if self._waiting:
                self._write()
            if self._file is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        return {"count": len(self), "digest": self._hash.hexdigest()}

    def restore(self, state: dict[str, Any]) -> None:
        """Read the ids of a checkpoint, and truncate the file after them."""
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
        """Open the file for writing after its first `size` bytes, and truncate it there."""
        self.close()
        try:
            new = not self._path.exists()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Without O_TRUNC, so that the first `size` bytes are kept.
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
        self._fence()
        if self._file is None:
            self._open(0)  # a new run: an existing file is from a run killed before its first checkpoint
        assert self._file is not None
        try:
            while self._waiting:
                size = self._file.write(self._waiting)
                # Only written bytes are hashed, so a write can be retried after a full disk.
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
