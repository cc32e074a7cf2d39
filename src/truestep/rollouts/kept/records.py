"""Whole records of a run's documents, as each step trained on them (`logging.rollouts.documents: all`).

A file begins with a step's number in its name and has the following steps, one block each:

    RECS | size of the head, 4 bytes | checksum of the head, 4 bytes | head | documents

The head is JSON: the step, and of each document its size as written, its size, and its checksum. A document is
compressed by itself, so that damage is told of the document that has it. A step is appended whole; what a kill left of
one is not read, and is cut off when the run goes on.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from zlib_ng.zlib_ng import crc32

from truestep.errors import TruestepError
from truestep.files.whole import cut_file, sync_directory, sync_files
from truestep.rollouts.documents import document_bytes, read_document_bytes
from truestep.types import Rollout

FOLDER = "records"
_MAGIC = b"RECS"
_LARGEST = 64 << 20  # bytes of a file, from which the next step begins another


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
    sizes: Sequence[Sequence[int]]  # of each document: as written, raw, checksum

    def read(self) -> list[Rollout]:
        """Read the step's documents. Raises `RecordsError` that names a damaged one by its place, from 1."""
        with self.file.open("rb") as file:
            file.seek(self.documents)
            content = file.read(self.end - self.documents)
        found, place = [], 0
        for number, (size, raw, checksum) in enumerate(self.sizes, 1):
            part = content[place : place + size]
            place += size
            if len(part) < size or crc32(part) != checksum:
                raise RecordsError(
                    f"{self.file}: the record of document {number} of step {self.step} is damaged: its bytes are not "
                    "those that were written"
                )
            found.append(read_document_bytes(_codec().decompress(part, raw).to_pybytes()))
        return found


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
    """Yield the blocks of a file of records. Damaged blocks are left out."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = 0
        while start < size:
            block = _block_at(handle, file, start, size)
            if block is not None:
                yield block
            start = _next_block(handle, start) if block is None else block.end


def _next_block(handle: BinaryIO, start: int) -> int:
    """Return where the block behind a damaged one begins."""
    handle.seek(start + 1)
    rest = handle.read()
    found = rest.find(_MAGIC)
    return start + 1 + (len(rest) if found < 0 else found)


def _block_at(handle: BinaryIO, file: Path, start: int, size: int) -> Block | None:
    handle.seek(start)
    begin = handle.read(12)
    if len(begin) < 12 or not begin.startswith(_MAGIC):
        return None
    head = handle.read(int.from_bytes(begin[4:8], "little"))
    if crc32(head) != int.from_bytes(begin[8:12], "little"):
        return None
    line = json.loads(head)
    first = start + 12 + len(head)
    end = first + sum(written for written, *_ in line["documents"])
    return Block(line["step"], file, start, first, end, line["documents"]) if end <= size else None


def roll_back(folder: Path, step: int) -> list[str]:
    """Remove the steps after `step`, and what is damaged behind it. Returns a message for each failure."""
    faults = []
    for file in _files(folder):
        try:
            kept = [block.end for block in blocks_in(file) if block.step <= step]
            if kept:
                cut_file(file, kept[-1])
            else:
                file.unlink()
        except OSError as error:
            faults.append(f"{file} holds steps that were rolled back, and cannot be cut: {error.strerror}")
    return faults


@dataclass
class RecordFiles:
    """The files of a run's records, to which steps are appended."""

    folder: Path
    most_bytes: float
    removed: Callable[[int], None] = lambda step: None  # told of the last step whose records had to go
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
