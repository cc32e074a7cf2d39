"""Whole records of a run's documents, as each step trained on them (`logging.rollouts.documents: all`).

A file begins with a step's number in its name and has the following steps, one block each:

    RECS | size of the head, 4 bytes | checksum of the head, 4 bytes | head | documents

The head is JSON: the step, and for each document its compressed size, its size, and the checksum of its compressed
bytes. Each document is compressed by itself, so that damage is reported for the document that has it. A step is
appended whole. An incomplete step, left by a kill, is not read, and is cut off when the run goes on.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from zlib_ng.zlib_ng import crc32

from truestep.errors import TruestepError
from truestep.files import bounded
from truestep.files.whole import cut_file, sync_directory, sync_files
from truestep.rollouts.documents import document_bytes, read_document_bytes
from truestep.text import printable
from truestep.types import Rollout

FOLDER = "records"
_MAGIC = b"RECS"
_BEGIN = re.compile(rb'RECS.{8}\{"step":', re.DOTALL)
_LONGEST_BEGIN = 19  # most bytes of a `_BEGIN` that the end of a piece may cut off
_PIECE = 1 << 20
_LARGEST = 64 << 20  # bytes of a file, from which the next step begins another
_LARGEST_HEAD = 64 << 20  # bytes of a head that is read; one of a million documents takes half of this
_MOST_DAMAGED = 100  # damaged heads in a file; reading past each may take `_LARGEST_HEAD` bytes
BAD_CONTENT = (*bounded.MALFORMED, MemoryError, OSError)  # errors of a block with any content


class RecordsError(TruestepError):
    """Kept records that are missing or damaged."""


@dataclass(frozen=True)
class Block:
    """A step's place in a file."""

    step: int
    file: Path
    start: int
    documents: int  # the place of the first document
    end: int
    sizes: Sequence[Sequence[int]]  # for each document: compressed size, size, checksum

    def read(self) -> list[Rollout]:
        """Read the step's documents. Raises `RecordsError` that names a bad one by its place, from 1."""
        return list(self.read_each())

    def read_each(self, most: int | None = None) -> Iterator[Rollout]:
        """Yield the step's documents, as `read` returns them. With `most` they are not trusted: JSON is read within
        limits, and a document of more than `most` bytes raises an error."""
        load = json.loads if most is None else bounded.load_json
        with self.file.open("rb") as file:
            file.seek(self.documents)
            for number, (size, raw, checksum) in enumerate(self.sizes, 1):
                if most is not None and max(size, raw) > most:
                    raise self._error(number, f"is not read: {bounded.too_long(most)}")
                part = file.read(size)
                if len(part) < size or crc32(part) != checksum:
                    raise self._error(number, "is damaged: its bytes are not those that were written")
                try:
                    document = read_document_bytes(_codec().decompress(part, raw).to_pybytes(), load)
                except BAD_CONTENT as error:
                    raise self._error(number, f"is no document: {describe(error)}") from error
                yield document

    def _error(self, number: int, what: str) -> RecordsError:
        return RecordsError(f"{self.file}: the record of document {number} of step {self.step} {what}")


def describe(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}", 200)


def _codec() -> Any:
    import pyarrow as arrow

    return arrow.Codec("zstd", compression_level=3)


def encode(step: int, documents: Sequence[Rollout]) -> bytes:
    """Return a step's block."""
    codec = _codec()
    raw = [document_bytes(document) for document in documents]
    parts = [codec.compress(content, asbytes=True) for content in raw]
    sizes = [(len(part), len(content), crc32(part)) for part, content in zip(parts, raw, strict=True)]
    head = json.dumps({"step": step, "documents": sizes}, separators=(",", ":")).encode()
    begin = _MAGIC + len(head).to_bytes(4, "little") + crc32(head).to_bytes(4, "little")
    return b"".join([begin, head, *parts])


def blocks_of(folder: Path) -> list[Block]:
    """Return the blocks of a run's records, in the order of steps. Damaged blocks are left out."""
    return [block for file in _files(folder) for block in blocks_in(file)]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("from-*.records")) if folder.is_dir() else []


def blocks_in(file: Path) -> Iterator[Block]:
    """Yield the blocks of a file of records. Damaged blocks are left out. Raises `RecordsError` if too many blocks are
    damaged, or if a block's head is undamaged but malformed."""
    size, damaged = file.stat().st_size, 0
    with file.open("rb") as handle:
        start = 0
        while start < size:
            block = _block_at(handle, file, start, size)
            if block is not None:
                yield block
                start = block.end
                continue
            damaged += 1
            if damaged > _MOST_DAMAGED:
                raise RecordsError(f"{file}: more than {_MOST_DAMAGED} of its steps are damaged")
            start = _next_block(handle, start, size)


def _next_block(handle: BinaryIO, start: int, size: int) -> int:
    """Return the place after `start` at which the next block may begin, or the file's `size` if there is none."""
    place, before = start + 1, b""
    handle.seek(place)
    while piece := handle.read(_PIECE):
        found = _BEGIN.search(before + piece)
        if found is not None:
            return place - len(before) + found.start()
        place += len(piece)
        before = (before + piece)[-_LONGEST_BEGIN:]
    return size


def _block_at(handle: BinaryIO, file: Path, start: int, size: int) -> Block | None:
    handle.seek(start)
    begin = handle.read(12)
    length = int.from_bytes(begin[4:8], "little")
    if not begin.startswith(_MAGIC) or not 0 < length <= min(_LARGEST_HEAD, size - start - 12):
        return None
    head = handle.read(length)
    if crc32(head) != int.from_bytes(begin[8:12], "little"):
        return None
    try:
        line = bounded.load_json(head, scale=4)
        step, sizes = line["step"], line["documents"]
        for number in (step, *(number for document in sizes for number in document)):
            if type(number) is not int or not 0 <= number < 2**62:
                raise ValueError(f"{printable(number, 40)} is no size")
        first = start + 12 + length
        end = first + sum(written for written, _, _ in sizes)
    except BAD_CONTENT as error:
        raise RecordsError(
            f"{file}: the step at byte {start:,} has no head that truestep wrote: {describe(error)}"
        ) from error
    return Block(step, file, start, first, end, sizes) if end <= size else None


def roll_back(folder: Path, step: int) -> list[str]:
    """Remove the steps after `step`, and damaged blocks after it. Returns a message for each failure."""
    faults = []
    for file in _files(folder):
        try:
            kept = [block.end for block in blocks_in(file) if block.step <= step]
            if kept:
                cut_file(file, kept[-1])
            else:
                file.unlink()
        except (OSError, RecordsError) as error:
            faults.append(f"{file} holds steps that were rolled back, and cannot be cut: {_reason(error)}")
    return faults


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or printable(error)


@dataclass
class RecordFiles:
    """The files of a run's records, to which steps are appended."""

    folder: Path
    most_bytes: float
    removed: Callable[[int], None] = lambda step: None  # called with the last step whose records were removed
    _file: Path | None = None
    _unsynced: set[Path] = field(default_factory=set)
    _total: int | None = None

    def append(self, step: int, content: bytes) -> None:
        if self._file is None or self._file.stat().st_size >= _LARGEST:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self.folder / f"from-{step:08}.records"
        file, self._file = self._file, None  # after a failed write the next step begins another file
        with file.open("ab") as handle:
            handle.write(content)
        self._file = file
        self._unsynced.add(self._file)
        if self._total is None:
            self._total = sum(file.stat().st_size for file in _files(self.folder))
        else:
            self._total += len(content)
        if self._total > self.most_bytes:
            self._thin()

    def _thin(self) -> None:
        """Remove the oldest files. The last one stays, whatever its size."""
        files = _files(self.folder)
        sizes = [file.stat().st_size for file in files]
        while len(files) > 1 and sum(sizes) > self.most_bytes:
            last = [block.step for block in blocks_in(files[0])]
            files.pop(0).unlink()
            sizes.pop(0)
            self.removed(max(last, default=0))
        self._total = sum(sizes)

    def sync(self) -> None:
        files, self._unsynced = self._unsynced, set()
        sync_files(files)
        if files and self.folder.is_dir():
            sync_directory(self.folder)
