"""Checksums of a checkpoint's files, so that a run does not resume from a file with a flipped byte.

`truestep/checksums.json` has a CRC-32 of each stretch of each file, so that threads compute several at a time, and so
that a message names the damaged bytes. zlib-ng computes the same CRC-32 as zlib, five times as fast. `comparison.py`
compares files with these checksums.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from zlib_ng.zlib_ng import crc32

from truestep.files.whole import exact_object, write_json
from truestep.process import progress
from truestep.ranks.processes import usable_cores

MANIFEST = "truestep/checksums.json"
STRETCH = 1 << 26  # bytes per checksum
READ = 1 << 20  # bytes read at a time
_FEW_THREADS = 4  # threads while a step computes
_MOST_THREADS = 8  # most threads; a checksum releases the GIL, and with more threads the disk is the limit


class RunningChecksums:
    """The checksums of a file that is being written."""

    def __init__(self) -> None:
        self._bytes, self._crc32 = 0, [0]

    def add(self, content: memoryview) -> None:
        while content:
            room = STRETCH - self._bytes % STRETCH
            if self._bytes and room == STRETCH:
                self._crc32.append(0)
            self._crc32[-1] = crc32(content[:room], self._crc32[-1])
            self._bytes, content = self._bytes + len(content[:room]), content[room:]

    def entry(self) -> dict[str, Any]:
        """Return the file's entry in the manifest."""
        return {"bytes": self._bytes, "crc32": self._crc32 if self._bytes else []}


def entry_of(content: memoryview) -> dict[str, Any]:
    """Return the entry in the manifest of a file whose bytes are in memory."""
    with ThreadPoolExecutor(min(_FEW_THREADS, usable_cores())) as pool:
        starts = range(0, len(content), STRETCH)
        return {"bytes": len(content), "crc32": list(pool.map(lambda start: _of_stretch(content, start), starts))}


def _of_stretch(content: memoryview, start: int) -> int:
    stretch = content[start : start + STRETCH]
    found = crc32(stretch)
    progress.made("bytes compared", len(stretch))
    return found


def write_checksums(checkpoint: Path, known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write the manifest of a checkpoint whose other files are complete. `known` has the entries, by file name, of
    files whose checksums were computed while they were written."""
    names = sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())
    sizes = {name: (checkpoint / name).stat().st_size for name in names if name != MANIFEST}
    files: dict[str, dict[str, Any]] = {name: {"bytes": size, "crc32": []} for name, size in sizes.items()}
    for name, entry in (known or {}).items():
        with (checkpoint / name).open("rb") as file:  # opened: on a network disk, stat may show an old size
            if (size := file.seek(0, os.SEEK_END)) != entry["bytes"]:
                raise OSError(f"{checkpoint / name} has {size} bytes, and {entry['bytes']} were written")
        files[name] = dict(entry)
    stretches = [
        (name, start) for name, size in sizes.items() if name not in (known or {}) for start in range(0, size, STRETCH)
    ]

    def of_stretch(one: tuple[str, int]) -> int:
        with (checkpoint / one[0]).open("rb", buffering=0) as file:
            return read_span(file, one[1], min(STRETCH, sizes[one[0]] - one[1]))

    with ThreadPoolExecutor(threads()) as pool:
        for (name, _), found in zip(stretches, pool.map(of_stretch, stretches), strict=True):
            files[name]["crc32"].append(found)
    write_json(checkpoint / MANIFEST, _manifest(files))


def _manifest(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {"bytes_per_checksum": STRETCH, "files": files}


def manifest_of(files: Mapping[str, bytes], known: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Make the manifest of a checkpoint in memory. `known` has the entries of its other files."""
    entries = dict(known) | {name: entry_of(memoryview(content)) for name, content in files.items()}
    return json.dumps(_manifest(entries)).encode()


def names_in(manifest: bytes) -> list[str]:
    """Return the names of the files that a manifest lists."""
    return list(exact_object(manifest)["files"])


def read_span(file: BinaryIO, start: int, length: int) -> int:
    """Return the checksum of some bytes of a file."""
    checksum, left = 0, length
    file.seek(start)
    while left > 0 and (block := file.read(min(READ, left))):
        checksum, left = crc32(block, checksum), left - len(block)
        progress.made("bytes read", len(block))
    return checksum


def threads() -> int:
    return min(_MOST_THREADS, usable_cores())
