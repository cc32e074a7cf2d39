"""Reading of rollout files: expanding patterns, streaming records, and loading checked documents in file order."""

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from truestep.errors import TruestepError
from truestep.files.bounded import TooLargeError, check_json, read_lines, too_long
from truestep.files.disks import no_file
from truestep.process import progress
from truestep.rollouts.advantages import assign_advantages
from truestep.rollouts.fields import Field
from truestep.rollouts.parquet import bad_row, read_parquet
from truestep.rollouts.record import BadRecord, Checks, parse_record
from truestep.rollouts.selection import choose_truncated
from truestep.rollouts.sequences import Joiner, Unfinished
from truestep.rollouts.values import describe
from truestep.text import printable
from truestep.types import PutAside, Rejected, Rollout

SUFFIXES = (".jsonl", ".parquet")


class DataError(TruestepError):
    """Files that cannot be used, or a bad record when rejected records stop the run."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of all files, in file order and then line order."""

    rollouts: Sequence[Rollout]
    rejected: tuple[Rejected, ...]
    put_aside: tuple[PutAside, ...] = ()


def expand_paths(path: str | list[str]) -> list[Path]:
    """Return the files that match the patterns, in pattern order, sorted within a pattern, without duplicates."""
    patterns = [path] if isinstance(path, str) else list(path)
    if not patterns:
        raise DataError("no data files: data.path is an empty list")
    found: dict[str, Path] = {}  # by resolved path: `a.jsonl` and `./a.jsonl` are one file
    for pattern in patterns:
        for file in _matches(pattern):
            found.setdefault(os.path.realpath(file), file)  # accepts a link to itself; opening it raises later
    return list(found.values())


def _matches(pattern: str) -> list[Path]:
    expanded = Path(pattern).expanduser()
    # An existing path is used literally, even if its name contains pattern characters such as brackets.
    names = [str(expanded)] if expanded.exists() else sorted(glob.glob(str(expanded), recursive=True))
    files = [Path(name) for name in names]
    if not files:
        raise DataError(f"no file matches {pattern!r}")
    for file in files:
        if file.is_dir():
            raise DataError(f"{file} is a directory: name its files, as in '{file}/*.jsonl'")
        if (kind := no_file(file)) is not None:
            raise DataError(f"{file} is {kind}, not a file")
        if file.suffix.lower() not in SUFFIXES:
            raise DataError(f"{file} has an unknown suffix: expected {' or '.join(SUFFIXES)}")
    return files


def read_records(paths: Iterable[Path], declared: Sequence[Field] = ()) -> Iterator[tuple[Path, int, Any]]:
    """Yield (file, line or row from 1, the record or a `BadRecord`). Raises `DataError` for an unreadable file.

    `declared` are the user's fields, whose Parquet columns are read too.
    """
    for path in paths:
        try:
            is_parquet = path.suffix.lower() == ".parquet"
            for line, record in read_parquet(path, declared) if is_parquet else _read_jsonl(path):
                progress.made("records read")
                yield path, line, record
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # column names may be invalid UTF-8
            raise DataError(f"{path} cannot be read: {printable(error)}") from error


def load_documents(paths: Sequence[Path], checks: Checks) -> Documents:
    """Read and check all records, and compute advantages. With `stop_at_rejected` a bad record raises `DataError`.

    If several valid records have the same id, the first one is kept. If the loss needs no advantages, rewards are only
    logged.
    """
    return _with_advantages(collect(paths, checks, lambda rollout: rollout), checks)


def check_records(records: Iterable[Any], checks: Checks) -> Sequence[Rollout]:
    """Check records of a program, and compute advantages as for those of files. A bad record raises `DataError`."""
    collected = _Collected(replace(checks, stop_at_rejected=True), lambda rollout: rollout)
    for number, record in enumerate(records):
        try:
            collected.add(parse_record(record, f"record {number}", checks), ("records", number))
        except BadRecord as error:
            collected.add_bad(error, ("records", number))
    return _with_advantages(collected.finish(), checks).rollouts


def _with_advantages(items: Sequence[Rollout | Rejected], checks: Checks) -> Documents:
    rule = checks.needs.advantage_rule if checks.needs.advantages else "none"
    rejected = tuple(item for item in items if isinstance(item, Rejected))
    rollouts = assign_advantages(items, rule=rule, group_size=checks.group_size)
    chosen, put_aside = choose_truncated(rollouts, checks.truncated)
    return Documents(tuple(chosen), rejected, tuple(put_aside))


def collect(paths: Sequence[Path], checks: Checks, keep: Callable[[Rollout], Any]) -> list[Any]:
    """Read and check all records. Return `keep(document)` for each document, and the rejected records, in order."""
    names = short_names(paths)
    collected = _Collected(checks, keep)
    for file, line, record in read_records(paths, checks.fields):
        try:
            rollout = parse_record(readable(record), f"{names[file]}:{line}", checks)
            collected.add(rollout, (str(file), line))
        except BadRecord as error:
            collected.add_bad(error, (str(file), line))
    return collected.finish()


class _Collected:
    """The documents and rejected records of files. A document of several sequences takes the place of its last
    record."""

    def __init__(self, checks: Checks, keep: Callable[[Rollout], Any]) -> None:
        self._items: list[Any] = []
        self._keep = keep
        self._first_places: dict[str, str] = {}  # where the first record with each id is
        self._closed: set[str] = set()  # ids of documents of several sequences
        self._stop, self._joiner = checks.stop_at_rejected, Joiner(self._closed.__contains__, checks.fields)

    def add(self, rollout: Rollout, place: tuple[str, int]) -> None:
        """Add a record. Raises `BadRecord` if its id, or its document's, came before."""
        if (problem := self._joiner.name_problem(rollout, self._first_places.__contains__)) is not None:
            raise BadRecord(problem, id=rollout.id)
        _check_new(rollout, self._first_places, ":".join(map(str, place)))
        if rollout.document_id is None:
            self._items.append(self._keep(rollout))
        else:
            self._end(rollout.document_id, self._joiner.add(rollout, place))

    def add_bad(self, error: BadRecord, place: tuple[str, int]) -> None:
        document = self._joiner.add_bad(error)
        # A document counts once in its group: with its first good record, and with its last one if all are bad.
        group_id = error.group_id if error.document_id is None else None
        if document is not None and not document.members:
            group_id = document.group_id
        self._reject(error.reason, place, error.id, group_id)
        self._end(error.document_id, document)

    def _end(self, name: str | None, document: Unfinished | None) -> None:
        if document is None or name is None:
            return
        self._closed.add(name)
        joined, refused = self._joiner.close(document)
        if joined is not None:
            self._items.append(self._keep(joined))
        for rollout, place, reason, group_id in refused:
            self._reject(reason, place, rollout.id, group_id)

    def _reject(self, reason: str, place: tuple[str, int], id: str | None, group_id: str | None) -> None:
        file, line = place
        if self._stop:
            raise DataError(f"{file}:{line}: {reason}")
        self._items.append(Rejected(file, line, reason, id, group_id))

    def finish(self) -> list[Any]:
        for name, document in self._joiner.finish():
            self._end(name, document)
        return self._items


def readable(record: Any) -> Any:
    """Return a record from a reader, or raise it if it is a `BadRecord`."""
    if isinstance(record, BadRecord):
        raise record
    return record


def _check_new(rollout: Rollout, first_places: dict[str, str], place: str) -> None:
    if (first := first_places.setdefault(rollout.id, place)) != place:
        reason = f"id is {describe(rollout.id)}: repeated, first at {first}"
        raise BadRecord(reason, id=rollout.id, group_id=None if rollout.document_id else rollout.group_id)


def short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return a unique short name for each file: its name with as many parent directories as needed.

    Default ids contain these names, so `step1/rollouts.jsonl` and `step2/rollouts.jsonl` need different ones. A name
    depends only on earlier files: ids stay the same when a run resumes with files added at the end.
    """
    names: dict[Path, str] = {}
    used: set[str] = set()
    for path in dict.fromkeys(paths):
        parts = path.absolute().parts
        tails = ("/".join(parts[-depth:]) for depth in range(1, len(parts) + 1))
        names[path] = next((tail for tail in tails if tail not in used), str(path))
        used.add(names[path])
    return names


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, (line, _) in enumerate(read_lines(file), start=1):
            if line is None:
                yield number, _long_line()
            elif (content := line_content(line, first=number == 1)) is not None:
                yield number, parse_json(content)


def line_content(line: bytes, first: bool) -> bytes | None:
    """Return a line without a byte order mark, or None if the line is blank."""
    if first:
        line = line.removeprefix(b"\xef\xbb\xbf")  # byte order mark, which some editors write
    return line if line.strip() else None


def _long_line() -> BadRecord:
    return BadRecord(f"the line is not read: {too_long()}")


def parse_json(line: bytes) -> Any:
    """Return the record of a line, or a `BadRecord` if the line is invalid JSON or repeats a key."""
    repeated: list[str] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return made

    try:
        check_json(line)
        record = json.loads(line.rstrip(b"\r\n").decode(), object_pairs_hook=to_dict)
    except UnicodeDecodeError as error:
        return BadRecord(f"not valid UTF-8: byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return BadRecord(f"not valid JSON: {error.msg} (column {error.colno})")
    except TooLargeError as error:
        return BadRecord(f"the record is not read: {error}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or very deep nesting
        return BadRecord(f"not readable JSON: {describe(str(error))}")
    if not repeated:
        return record
    trusted = {key: value for key, value in record.items() if key not in repeated} if isinstance(record, dict) else {}
    return bad_row(f"the key {describe(repeated[0])} is given twice", trusted)
