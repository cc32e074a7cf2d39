"""Checksums of a checkpoint's files, so that a run does not resume from a file with a flipped byte.

`truestep/checksums.json` has a CRC-32 of each stretch of each file, so that threads and ranks can check parts of one
file in parallel, and so that the message names the damaged bytes. zlib-ng computes the same CRC-32 as zlib, five times
as fast.
"""

import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32

from truestep.files.whole import LineError, exact_object, write_json
from truestep.process import progress
from truestep.ranks.processes import usable_cores
from truestep.text import printable

MANIFEST = "truestep/checksums.json"
STRETCH = 1 << 26  # bytes per checksum
_READ = 1 << 20  # bytes read at a time
_FEW_THREADS = 4  # beside a step
_MOST_THREADS = 8  # computing a checksum releases the GIL; with more threads the disk is the limit


@dataclass(frozen=True)
class _Stretch:
    name: str
    start: int
    length: int
    checksum: int


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
        _Stretch(name, start, min(STRETCH, size - start), 0)
        for name, size in sizes.items()
        if name not in (known or {})
        for start in range(0, size, STRETCH)
    ]
    with ThreadPoolExecutor(_threads()) as pool:
        for stretch, found in zip(stretches, pool.map(lambda one: _checksum(checkpoint, one), stretches), strict=True):
            files[stretch.name]["crc32"].append(found)
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


def find_damage(checkpoint: Path, part: int = 0, parts: int = 1, only: Collection[str] | None = None) -> str | None:
    """Compare the files with their checksums; describe the first damage found, or return None. With several ranks, each
    checks part `part` of `parts`. `only`: the names of the files to compare, if not all.

    A directory without checksums is not checked.
    """
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return None
    try:
        content = exact_object(manifest.read_bytes())
        stretches = _share(list(_stretches(checkpoint, content, only)), part, parts)
        size = sum(stretch.length for stretch in stretches)
        reading = progress.working("comparing the checkpoint with its checksums", "bytes read", size)
        with reading, ThreadPoolExecutor(_threads()) as pool:
            found = pool.map(lambda one: _checksum(checkpoint, one), stretches)
            for stretch, checksum in zip(stretches, found, strict=True):
                if checksum != stretch.checksum:
                    end = stretch.start + stretch.length
                    return f"{stretch.name} is damaged in its bytes {stretch.start} to {end}"
    except _Mismatch as mismatch:
        return printable(mismatch)
    except (LineError, AttributeError, KeyError, TypeError, ValueError) as error:
        return printable(f"{MANIFEST} is damaged: {error!r}")
    except OSError as error:
        return printable(f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror or error}")
    return None


def _share(stretches: list[_Stretch], part: int, parts: int) -> list[_Stretch]:
    """Return a part of the stretches, one after another: of a checkpoint of other ranks too, a rank then reads mostly
    what it loads afterwards, which the host still has in its cache."""
    ends = list(itertools.accumulate(stretch.length for stretch in stretches))
    total = ends[-1] if ends else 0
    bounds = [bisect_left(ends, number * total / parts) for number in (part, part + 1)]
    return stretches[bounds[0] : len(stretches) if part + 1 == parts else bounds[1]]


class _Mismatch(Exception):  # noqa: N818 - it carries a finding
    """A file is missing or has another size."""


def _stretches(checkpoint: Path, content: dict[str, Any], only: Collection[str] | None) -> Iterator[_Stretch]:
    length = content["bytes_per_checksum"]
    if content.keys() != {"bytes_per_checksum", "files"} or type(length) is not int or length < _READ:
        raise ValueError("it lacks its fields, or has others")
    for name, facts in content["files"].items():
        size, checksums = facts["bytes"], facts["crc32"]
        if type(size) is not int or size < 0 or len(checksums) != -(-size // length):
            raise ValueError(f"the size of {name} or its number of checksums is malformed")
        file = checkpoint / name
        if only is not None and name not in only:
            continue
        if not file.is_file():
            raise _Mismatch(f"{name} is missing")
        if (there := file.stat().st_size) != size:
            raise _Mismatch(f"{name} has {there} bytes, and {size} were written")
        for index, checksum in enumerate(checksums):
            yield _Stretch(name, index * length, min(length, size - index * length), checksum)


def _checksum(checkpoint: Path, stretch: _Stretch) -> int:
    checksum, left = 0, stretch.length
    with (checkpoint / stretch.name).open("rb", buffering=0) as file:
        file.seek(stretch.start)
        while left > 0 and (block := file.read(min(_READ, left))):
            checksum, left = crc32(block, checksum), left - len(block)
            progress.made("bytes read", len(block))
    return checksum


def _threads() -> int:
    return min(_MOST_THREADS, usable_cores())
