"""Opens untrusted files and yields their records. Every decoder has a size limit, and no pickle can run code."""

import gzip
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from truestep.errors import TruestepError
from truestep.files import bounded
from truestep.files.disks import no_file
from truestep.rollouts.documents import record_lines
from truestep.rollouts.files import line_content
from truestep.rollouts.kept.records import BAD_CONTENT, RecordsError, blocks_in, describe
from truestep.rollouts.pages import batches, checked_groups
from truestep.text import printable
from truestep.tools.audit.kept import LEDGER, files_of, is_run
from truestep.types import ROUTES, Rollout

_MOST_FILES = 10_000
_MOST_DECOMPRESSED = 8192 * bounded.MIB  # bytes of compressed JSON lines or kept documents, once decompressed
_MOST_KEPT = 256 * bounded.MIB  # bytes of a kept document
_MOST_SCORES = bounded.MIB  # parts of a kept document's reward, in all of its sequences
_MOST_JSON = 1024 * bounded.MIB  # bytes of a JSON file that is a single value


class UnreadableError(TruestepError):
    """Raised for input that cannot be audited: exit code 2."""


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files of the paths. For a directory, these are the files with a known suffix, ordered by the numbers
    in their names; for the directory of a run, those of the documents that it has kept."""
    found: dict[str, Path] = {}
    if len({os.path.realpath(path) for path in paths if is_run(path)}) > 1:
        raise UnreadableError("several runs are named: audit each by itself, as a run's steps and groups are compared")
    for path in paths:
        if path.is_dir():
            files = sorted(_files_in(path), key=lambda file: _by_numbers(str(file)))
        else:
            if (kind := no_file(path)) is not None:
                raise UnreadableError(f"{path} is {kind}, not a file")
            files = [path]
        found |= {os.path.realpath(file): file for file in files}
        if len(found) > _MOST_FILES:
            raise UnreadableError(f"more than {_MOST_FILES:,} files are named: name some of them")
    return list(found.values())


def _files_in(folder: Path) -> list[Path]:
    if is_run(folder):
        if not (files := files_of(folder)):
            raise UnreadableError(
                f"the run {folder} has kept no rollouts: logging.rollouts says which ones a run keeps"
            )
        return files
    runs = sorted(file.parent for file in folder.rglob(LEDGER))
    if runs:
        held = f"the directories of {len(runs)} runs: name one, such as" if runs[1:] else "the directory of a run: name"
        raise UnreadableError(f"{folder} holds {held} {runs[0]}")
    files = [file for file in folder.rglob("*") if _suffix(file) in READERS and file.is_file()]
    if not files:
        raise UnreadableError(f"{folder} holds no file that ends with {', '.join(READERS)}")
    return files


def _by_numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line or row from 1, record). A file with a single JSON value gives one record, or if it is a list, its
    items."""
    reader = READERS.get(_suffix(path))
    if reader is None:
        raise UnreadableError(f"{path} has an unknown suffix: expected {', '.join(READERS)}")
    try:
        yield from reader(path)
    except RecordsError as error:
        raise UnreadableError(str(error)) from error  # it names the file
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        pa.ArrowException,
    ) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UnreadableError(f"{path} cannot be read: {printable(error)}") from error


def _suffix(path: Path) -> str:
    """Return a file's suffix, or the last two suffixes of a compressed file, such as .jsonl.gz."""
    end = path.suffix.lower()
    return f"{path.with_suffix('').suffix.lower()}{end}" if end == ".gz" else end


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        yield from _lines(file)


def _read_compressed_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(path, "rb") as file:
        yield from _lines(cast(BinaryIO, file), _MOST_DECOMPRESSED)


def _lines(file: BinaryIO, most: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the records of JSON lines, of at most `most` bytes in all."""
    total = 0
    for number, (line, length) in enumerate(bounded.read_lines(file), start=1):
        total += length
        if line is None:
            raise ValueError(f"line {number}: {bounded.too_long()}")
        if most is not None and total > most:
            raise ValueError(f"decompressed, {bounded.too_long(most)}")
        if (content := line_content(line, first=number == 1)) is not None:
            try:
                yield number, bounded.load_json(content)
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from None


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    value = bounded.load_json(bounded.read_settings(path, _MOST_JSON), scale=8)
    yield from enumerate(value if isinstance(value, list) else [value], start=1)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    with pq.ParquetFile(path, pre_buffer=False) as file:
        columns = file.schema_arrow.names
        if len(set(columns)) < len(columns):
            raise ValueError("two of its columns have the same name")
        for group in checked_groups(path, file.metadata, columns):
            for batch in batches(file, columns, group):
                for index in range(batch.num_rows):
                    number += 1
                    yield number, batch.slice(index, 1).to_pylist()[0]


def _read_kept(path: Path) -> Iterator[tuple[int, Any]]:
    """Read whole records that a run of truestep has kept (`logging.rollouts.documents: all`)."""
    number = end = total = 0
    for block in blocks_in(path):
        if block.start != end:  # what a kill has left of a step is at the end
            raise ValueError(f"its bytes {end:,} to {block.start:,} are damaged")
        end = block.end
        for place, document in enumerate(block.read_each(_MOST_KEPT), 1):
            total += block.sizes[place - 1][1]
            if total > _MOST_DECOMPRESSED:
                raise ValueError(f"decompressed, {bounded.too_long(_MOST_DECOMPRESSED)}")
            try:
                lines = _lines_of(document)
            except BAD_CONTENT as error:
                raise ValueError(f"document {place} of step {block.step} is none of ours: {describe(error)}") from error
            for record in lines:
                number += 1
                yield number, record | {"step": block.step}


def _lines_of(document: Rollout) -> list[dict[str, Any]]:
    """Return a document's records, without what no check looks at."""
    starts, ids = document.starts, document.record_ids
    ordered = all(first < second for first, second in pairwise((*starts, document.num_tokens)))
    if len(ids) != len(starts) or starts[:1] not in ((), (0,)) or (starts and not ordered):
        raise ValueError("its sequences do not follow each other")
    if len(starts) * len(document.rewards) > _MOST_SCORES:
        raise ValueError(f"its rewards have more than {_MOST_SCORES:,} parts")
    routes = {name: rows for name, rows in document.token_fields.items() if name == ROUTES}
    plain = replace(document, fields={}, token_fields=routes, document_fields={}, metadata={}, turns=())
    return record_lines(plain)


def _read_torch(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a file of torch.save. Only tensors, numbers, strings, lists, dicts and NumPy arrays are unpickled."""
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("its archive is compressed, which torch.save never does")
        with ExitStack() as stack:
            stack.enter_context(torch.serialization.safe_globals(_numpy_globals()))
            yield 1, torch.load(path, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise ValueError("it is no archive of torch.save") from error
    except ValueError:
        raise
    except Exception as error:  # pickle.UnpicklingError, or any error that torch raises for a damaged archive
        named = re.search(r"GLOBAL ([\w.]+)|type ([\w.]+)", str(error))
        what = next(filter(None, named.groups()), "") if named else ""
        reason = f"its pickle asks for {what}" if what else printable(str(error).splitlines()[0])
        raise ValueError(
            f"{reason}: only tensors, arrays and plain values are read, since a pickle may run code"
        ) from error


def _numpy_globals() -> list[Any]:
    reconstruct: Any = np.zeros(0).__reduce__()[0]
    dtypes = [type(np.dtype(kind)) for kind in ("bool", "u1", "i1", "i2", "u2", "i4", "i8", "f2", "f4", "f8")]
    scalar: Any = np.float64(0).__reduce__()[0]
    # Files of older NumPy versions name another module for the same functions.
    old = [(function, f"numpy.core.multiarray.{function.__name__}") for function in (reconstruct, scalar)]
    return [reconstruct, scalar, np.ndarray, np.dtype, *dtypes, *old]


READERS = {
    ".jsonl": _read_lines,
    ".jsonl.gz": _read_compressed_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".records": _read_kept,
    ".pt": _read_torch,
    ".pth": _read_torch,
}
