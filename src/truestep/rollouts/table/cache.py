"""The cache of tables on a host, one directory per rollout file.

A table is complete or absent, and valid only for the exact file content it was made from. One process converts a file
under a lock; other processes (ranks of this run or of other runs) wait and then share the table.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from zlib_ng.zlib_ng import crc32

from truestep.files.whole import sync_directory, sync_tree
from truestep.process import progress
from truestep.rollouts.fields import Field
from truestep.rollouts.files import DataError
from truestep.rollouts.table.convert import convert, jobs_of
from truestep.rollouts.table.layout import ROWS, PartReader, format_of, map_arrow, write_arrow
from truestep.text import printable

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_SECONDS = 0.1
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "truestep" / "data"


def identity_of(path: Path) -> dict[str, Any]:
    """Return a file's identity: its path, size, inode and times, and a digest of sampled blocks.

    Only a change that keeps the size, the ctime and every sampled block goes unnoticed, which does not happen by
    accident.
    """
    state = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in sorted({round(number * state.st_size / _SAMPLES) for number in range(_SAMPLES)}):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(state.st_size - 16 * _SAMPLE_BYTES, 0))
        digest.update(file.read())
    return {
        "path": os.fsencode(path.resolve()).hex(),
        "size": state.st_size,
        "modified": state.st_mtime_ns,
        "changed": state.st_ctime_ns,
        "inode": state.st_ino,
        "samples": digest.hexdigest(),
    }


@dataclass(frozen=True, eq=False)
class Table:
    """The memory-mapped table of a file's records."""

    file: Path
    directory: Path
    rows: pa.Table
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        # The cache is bounded because each open part holds a file descriptor for its mapping.
        object.__setattr__(self, "part", lru_cache(maxsize=1024)(self._open_part))

    part: Callable[[int], PartReader] = None  # type: ignore[assignment]

    def _open_part(self, number: int) -> PartReader:
        try:
            return PartReader(self.directory / f"{number:06d}.values")
        except (OSError, pa.ArrowException, KeyError) as error:
            raise self.damaged(str(error)) from error

    def damaged(self, reason: str) -> DataError:
        """Return the error for a damaged table, and delete `table.json` so that the next start converts it again."""
        with contextlib.suppress(OSError):
            (self.directory / "table.json").unlink()
        return DataError(
            f"data.cache_directory: the converted copy of {printable(self.file)} in {printable(self.directory)} is "
            f"damaged ({printable(reason)}); start again, and it is made anew"
        )

    def column(self, name: str) -> np.ndarray:
        values: np.ndarray = self.rows.column(name).to_numpy()
        return values

    def has(self, name: str) -> np.ndarray:
        """Return which records have a field, as a boolean array."""
        found = pc.match_substring(self.rows.column("has"), f" {name} ")
        values: np.ndarray = pc.fill_null(found, False).to_numpy()
        return values

    def flags(self, name: str) -> np.ndarray:
        """Return a boolean column, with False for nulls."""
        values: np.ndarray = pc.fill_null(self.rows.column(name), False).to_numpy()
        return values


@contextlib.contextmanager
def table_of(path: Path, cache: Path, declared: Sequence[Field] = ()) -> Iterator[Table]:
    """Open a file's table, converting the file if needed. The lock is held while the block runs.

    `declared` are the user's fields.
    """
    try:
        identity = identity_of(path)
    except OSError as error:
        raise DataError(f"{printable(path)} cannot be read: {printable(error)}") from error
    key = hashlib.sha256(f"{format_of(declared)}\n{identity['path']}".encode()).hexdigest()[:24]
    with _told(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock", cache, path):
            table = _open(path, cache / key, identity)
            if table is None:
                _make(path, cache / key, identity, declared)
                table = _open(path, cache / key, identity)
                if table is None:
                    raise DataError(f"data.cache_directory: what was written to {printable(cache)} cannot be read back")
            yield table


@contextlib.contextmanager
def _told(cache: Path) -> Iterator[None]:
    """Convert an OSError of the cache's file system to a `DataError`."""
    try:
        yield
    except OSError as error:
        where = printable(cache)
        if error.errno in _FULL:
            raise DataError(
                f"data.cache_directory: the disk of {where} is full. Rollout files are converted into it once and take "
                "about half of their size there: name a directory with more room"
            ) from error
        raise DataError(f"data.cache_directory: {where} cannot be used: {printable(error)}") from error


@contextlib.contextmanager
def _locked(lock: Path, cache: Path, path: Path) -> Iterator[None]:
    with lock.open("a") as handle:
        with progress.waiting_for(f"another process that converts {printable(path)}"):
            seen = -1
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in _HELD:
                        break  # no locks on this file system: two processes may convert the file, and one result stays
                done = sum(1 for _ in cache.glob(f".{lock.stem}.*/*.rows"))
                if done != seen:
                    seen = done
                    progress.made("parts that another process converted")
                time.sleep(_POLL_SECONDS)
        yield


def _open(path: Path, directory: Path, identity: dict[str, Any]) -> Table | None:
    """Open a table, or return None if it is absent, damaged or made from other file content."""
    try:
        content = json.loads((directory / "table.json").read_bytes())
        if content["identity"] != identity:
            return None
        if any((directory / name).stat().st_size != size for name, size in content["sizes"].items()):
            return None
        if _checksum(directory / "rows.arrow") != content["rows"]:
            return None
        rows = map_arrow(directory / "rows.arrow")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        return None
    return Table(path, directory, rows, identity) if rows.schema == ROWS else None


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            total = crc32(block, total)
    return total


def _make(path: Path, directory: Path, identity: dict[str, Any], declared: Sequence[Field]) -> None:
    """Convert a file to a table in a temporary directory, sync it, and rename it to `directory`."""
    for leftover in directory.parent.glob(f".{directory.name}.*"):  # left by killed processes
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _convert_into(path, work, declared)
        try:
            changed = identity_of(path) != identity
        except OSError:
            changed = True
        if changed:
            raise DataError(f"{printable(path)} was changed while it was read: start again when it is complete")
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        content = {"identity": identity, "sizes": sizes, "rows": _checksum(work / "rows.arrow")}
        (work / "table.json").write_text(json.dumps(content), encoding="utf-8")
        sync_tree(work)
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
            os.replace(directory, old)
            shutil.rmtree(old, ignore_errors=True)
        os.replace(work, directory)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert_into(path: Path, work: Path, declared: Sequence[Field]) -> None:
    try:
        jobs = jobs_of(path, work, declared)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{printable(path)} cannot be read: {printable(error)}") from error
    with progress.working(f"converting {printable(path.name, 40)}", "bytes read", sum(job.size for job in jobs)):
        results = convert(jobs)
    for result in results:
        if result.get("errno") in _FULL:
            raise OSError(result["errno"], result["error"])
        if "error" in result:
            raise DataError(f"{printable(path)} cannot be converted: {printable(result['error'])}")
    lines, pieces = 0, []
    for number, (job, result) in enumerate(zip(jobs, results, strict=True)):
        piece = Path(job.output).with_suffix(".rows")
        pieces.append(_placed(map_arrow(piece), lines, number))
        piece.unlink()
        lines += result["lines"]
    write_arrow(work / "rows.arrow", pa.concat_tables([ROWS.empty_table(), *pieces]))


def _placed(rows: pa.Table, lines_before: int, part: int) -> pa.Table:
    """Return a part's rows with line numbers counted from the file's start, and with the part's number."""
    lines = pc.add(rows.column("line"), lines_before)
    parts = pa.array(np.full(rows.num_rows, part, np.int32))
    return rows.set_column(ROWS.names.index("line"), ROWS.field("line"), lines).set_column(
        ROWS.names.index("part"), ROWS.field("part"), parts
    )
