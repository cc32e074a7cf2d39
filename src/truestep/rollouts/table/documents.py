"""The documents of tables: checked column by column at the start of a run, and read on demand in file order."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from truestep.process import progress
from truestep.rollouts.advantages import as_rule, assign_advantages
from truestep.rollouts.fields import Field
from truestep.rollouts.files import (
    DataError,
    Documents,
    load_documents,
    read_record,
    readable,
    short_names,
)
from truestep.rollouts.parquet import read_parquet
from truestep.rollouts.record import Checks, parse_record, with_defaults
from truestep.rollouts.table.cache import Table, default_directory, table_of
from truestep.rollouts.table.convert import is_parquet
from truestep.rollouts.table.layout import checksum, make_rollout
from truestep.rollouts.values import BadRecord, describe
from truestep.types import Rejected, Rollout

LARGE_BYTES = 1 << 24  # total size from which tables are used; less is read into memory in under a second
_KEPT = 4096  # documents in the cache of groups with advantages

_REFUSED = pa.schema(
    [("row", pa.int64()), ("reason", pa.large_string()), ("id", pa.large_string()), ("group_id", pa.large_string())]
)


def open_documents(paths: Sequence[Path], checks: Checks, cache: Path | None = None) -> Documents:
    """Read small files into memory, and open large files as tables in `cache` (default: the user's cache directory).

    A table holds documents as they are in the file. Runs that tokenize chat messages, or mask or drop truncated
    documents, therefore read files of any size into memory.
    """
    if not tables_hold(checks):
        return load_documents(paths, checks)
    with suppress(OSError):  # reading the file below reports the error
        if sum(path.stat().st_size for path in paths) >= LARGE_BYTES:
            return load_tables(paths, checks, cache or default_directory())
    return load_documents(paths, checks)


def tables_hold(checks: Checks) -> bool:
    """Return whether a run takes documents exactly as they are in its files, so that tables can hold them."""
    return checks.chat is None and checks.truncated == "keep"


def load_tables(paths: Sequence[Path], checks: Checks, cache: Path) -> Documents:
    """Return the same documents as `load_documents`, without holding them in memory.

    Files with documents of several sequences are read into memory.
    """
    tables, refused = [], []
    for path in paths:
        with table_of(path, cache, checks.fields) as table:
            if table.has("document_id").any():
                return load_documents(paths, checks)
            tables.append(table)
            refused.append(_refused(table, checks))
    names = short_names(paths)
    selection = _Selection(tables, refused, [names[path] for path in paths])
    rejected = selection.rejected()
    if rejected and checks.stop_at_rejected:
        raise DataError(f"{rejected[0].file}:{rejected[0].line}: {rejected[0].reason}")
    return Documents(TableDocuments(selection, checks), tuple(rejected))


def _from_rewards(checks: Checks) -> bool:
    return checks.needs.advantages and as_rule(checks.needs.advantage_rule).from_rewards


# ---- records of one table that fail the run's checks


def _refused(table: Table, checks: Checks) -> pa.Table:
    """Return the records that fail the checks, with reasons. The result is cached in the table's directory."""
    demands = (
        checks.max_tokens,
        checks.vocabulary_size,
        checks.needs.logprobs,
        checks.needs.advantages,
        _from_rewards(checks),
        checks.needs.reference_logprobs,
        [field.name for field in checks.fields if field.required],
    )
    key = hashlib.sha256(repr(demands).encode()).hexdigest()[:16]
    kept = table.directory / f"refused-{key}"
    try:
        content = kept.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return pa.ipc.open_stream(content[32:]).read_all()
    except (OSError, pa.ArrowException):
        pass  # not cached yet, or damaged
    found = _refuse(table, checks, np.flatnonzero(_doubtful(table, checks)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _REFUSED) as writer:
        writer.write_table(found)
    content = sink.getvalue().to_pybytes()
    partial = kept.with_suffix(".partial")
    partial.write_bytes(hashlib.sha256(content).digest() + content)
    partial.replace(kept)
    return found


def _doubtful(table: Table, checks: Checks) -> np.ndarray:
    """Return which records fail the checks, as a boolean array computed from whole columns."""
    needs, valid = checks.needs, table.flags("valid")
    bad: np.ndarray = ~valid
    if checks.max_tokens is not None:
        bad |= valid & (table.column("num_tokens") > checks.max_tokens)
    if checks.vocabulary_size is not None:
        bad |= valid & (table.column("largest_id") >= checks.vocabulary_size)
    labelled = valid & (table.column("num_labels") > 0)
    if needs.logprobs:
        bad |= labelled & ~table.has("logprobs")
    if needs.reference_logprobs:
        bad |= labelled & ~table.has("reference_logprobs")
    for field in checks.fields:
        if field.required:
            bad |= (labelled if field.masked else valid) & ~table.has(field.name)
    if needs.advantages:
        present = table.has("advantages")
        if _from_rewards(checks):
            has = [pc.is_valid(table.rows.column(name)).to_numpy() for name in ("reward", "group_id")]
            present = present | (has[0] & has[1])
        bad |= labelled & ~present
    return bad


def _refuse(table: Table, checks: Checks, rows: np.ndarray) -> pa.Table:
    """Read the failing records again from their file and return the reason of each."""
    found: dict[str, list[Any]] = {name: [] for name in _REFUSED.names}
    for row, record in zip(rows.tolist(), _records(table, rows, checks.fields), strict=True):
        progress.made("records read")
        try:
            parse_record(readable(record), "?", checks)
        except BadRecord as error:
            for name, value in zip(_REFUSED.names, (row, error.reason, error.id, error.group_id), strict=True):
                found[name].append(value)
        else:
            raise table.damaged(f"record {row} of it is not as it was")
    return pa.table(found, schema=_REFUSED)


def _records(table: Table, rows: np.ndarray, declared: Sequence[Field]) -> Iterator[Any]:
    try:
        if is_parquet(table.file):
            wanted = set(rows.tolist())
            if wanted:
                yield from (
                    record for number, record in read_parquet(table.file, declared=declared) if number - 1 in wanted
                )
            return
        offsets = table.column("offset")
        with table.file.open("rb") as file:
            for row in rows.tolist():
                file.seek(offsets[row])
                yield read_record(file, first=offsets[row] == 0)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{table.file} cannot be read: {error}") from error


# ---- accepted records of all tables


class _Selection:
    """The accepted records of all tables, in order: without refused records and repeated ids."""

    def __init__(self, tables: Sequence[Table], refused: Sequence[pa.Table], names: Sequence[str]):
        self.tables, self.names = tables, names
        self._starts = np.cumsum([0, *(table.rows.num_rows for table in tables)])
        # (reason, id, group_id) by the record's number, counted over all tables.
        self._rejected: dict[int, tuple[str, str | None, str | None]] = {}
        for start, found in zip(self._starts[:-1].tolist(), refused, strict=True):
            columns = [found.column(name).to_pylist() for name in _REFUSED.names]
            for row, why, identifier, group_id in zip(*columns, strict=True):
                self._rejected[start + row] = (why, identifier, group_id)
        accepted = np.ones(self._starts[-1], bool)
        accepted[list(self._rejected)] = False
        ids = pa.chunked_array(
            [chunk for table in tables for chunk in table.rows.column("id").chunks], pa.large_string()
        )
        for record, first in self._repeated(ids, accepted):
            name, group = self.name(record), self.text("group_id", record)
            reason = f"id is {describe(name)}: repeated, first at {self.place(first)}"
            self._rejected[record] = (reason, name, group)
            accepted[record] = False
        self.records = np.flatnonzero(accepted)  # record number of each document

    def _repeated(self, ids: pa.ChunkedArray, accepted: np.ndarray) -> list[tuple[int, int]]:
        """Return (record, first record with the same id) for each record with a repeated id."""
        own = np.flatnonzero(accepted & ids.is_valid().to_numpy())
        if not len(own):
            return []  # default ids, made of file and line, are unique
        suspects: list[int] = []
        chosen = ids.take(pa.array(own)).combine_chunks()
        codes = chosen.dictionary_encode()
        codes = (codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes).indices.to_numpy()
        counts = np.bincount(codes)
        suspects += own[counts[codes] > 1].tolist()
        # A given id may also equal the default id ("file:line") of another record.
        alike = np.zeros(len(own), bool)
        for name in self.names:
            alike |= pc.starts_with(chosen, f"{name}:").to_numpy(zero_copy_only=False)
        if alike.any():
            suspects = np.flatnonzero(accepted).tolist()
        first: dict[str, int] = {}
        pairs = []
        for record in sorted(suspects):
            earlier = first.setdefault(self.name(record), record)
            if earlier != record:
                pairs.append((record, earlier))
        return pairs

    def locate(self, record: int) -> tuple[Table, int]:
        number = int(np.searchsorted(self._starts, record, "right")) - 1
        return self.tables[number], record - int(self._starts[number])

    def text(self, column: str, record: int) -> str | None:
        table, row = self.locate(record)
        value: str | None = table.rows.column(column)[row].as_py()
        return value

    def name(self, record: int) -> str:
        number = int(np.searchsorted(self._starts, record, "right")) - 1
        own = self.text("id", record)
        return f"{self.names[number]}:{self._line(record)}" if own is None else own

    def _line(self, record: int) -> int:
        table, row = self.locate(record)
        return int(table.rows.column("line")[row].as_py())

    def place(self, record: int) -> str:
        return f"{self.locate(record)[0].file}:{self._line(record)}"

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of all tables, concatenated."""
        chunks = [chunk for table in self.tables for chunk in table.rows.column(name).chunks]
        return pa.chunked_array(chunks, self.tables[0].rows.schema.field(name).type)

    def rejected(self) -> list[Rejected]:
        found = []
        for record in sorted(self._rejected):
            reason, identifier, group_id = self._rejected[record]
            table, _ = self.locate(record)
            found.append(Rejected(str(table.file), self._line(record), reason, identifier, group_id))
        return found

    def groups(self, group_size: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Divide the documents into groups. Returns (members, starts, records per group id).

        Group g has the documents `members[starts[g]:starts[g + 1]]`. A group closes at `group_size` records, counting
        rejected ones.
        """
        names = self.column("group_id")
        if self._rejected:  # use the group ids of rejected records that could be read
            records = pa.array(list(self._rejected), pa.int64())
            groups = pa.array([group for _, _, group in self._rejected.values()], pa.large_string())
            order = pc.sort_indices(records)
            mask = np.zeros(len(names), bool)
            mask[list(self._rejected)] = True
            names = pa.chunked_array([pc.replace_with_mask(names.combine_chunks(), pa.array(mask), groups.take(order))])
        present = np.flatnonzero(names.is_valid().to_numpy())
        chosen = pa.chunked_array([names.take(pa.array(present)).combine_chunks()]).combine_chunks()
        codes = _codes(chosen)
        order_of = np.argsort(codes, kind="stable")
        codes, records_in = codes[order_of], present[order_of]
        firsts = np.flatnonzero(np.diff(codes, prepend=-1))
        members_of = np.diff(np.append(firsts, len(codes)))
        place = np.arange(len(codes)) - np.repeat(firsts, members_of)
        new = (place == 0) if group_size is None else (place % group_size == 0)
        group = np.cumsum(new) - 1
        index_of = np.full(int(self._starts[-1]), -1)
        index_of[self.records] = np.arange(len(self.records))
        documents = index_of[records_in]
        kept = documents >= 0
        members, group = documents[kept], group[kept]
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        return members, np.append(starts, len(members)), members_of


def _codes(texts: Any) -> np.ndarray:
    encoded = texts.dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    codes: np.ndarray = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


class TableDocuments(Sequence[Rollout]):
    """A sequence of the documents of all tables. Each is read from its table when it is indexed."""

    def __init__(self, selection: _Selection, checks: Checks):
        self._selection, self._checks = selection, checks
        self._group_of: np.ndarray | None = None
        self._kept: OrderedDict[int, dict[int, Rollout]] = OrderedDict()  # LRU cache of groups with advantages
        self.group_members: list[int] = []  # records per group id, if advantages come from rewards
        if _from_rewards(checks) and len(selection.records):
            self._members, self._group_starts, members = selection.groups(checks.group_size)
            self.group_members = members.tolist()
            self._group_of = np.full(len(selection.records), -1)
            sizes = np.diff(self._group_starts)
            self._group_of[self._members] = np.repeat(np.arange(len(sizes)), sizes)

    def __len__(self) -> int:
        return len(self._selection.records)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        group = -1 if self._group_of is None else int(self._group_of[number])
        return self._read(number) if group < 0 else self._group(group)[number]

    def _group(self, group: int) -> dict[int, Rollout]:
        """Return a group's documents with advantages, by document number."""
        if group not in self._kept:
            numbers = self._members[self._group_starts[group] : self._group_starts[group + 1]].tolist()
            rule = self._checks.needs.advantage_rule
            rollouts = assign_advantages(map(self._read, numbers), rule=rule, group_size=None)
            self._kept[group] = dict(zip(numbers, rollouts, strict=True))
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _read(self, number: int) -> Rollout:
        record = int(self._selection.records[number])
        table, row = self._selection.locate(record)
        part, index, expected, reward, group_id = (
            table.rows.column(name)[row].as_py() for name in ("part", "index", "checksum", "reward", "group_id")
        )
        arrays, others = table.part(part).stored(index)
        if checksum(arrays, others) != expected:
            raise table.damaged(f"the values of record {row} are not what was written")
        rollout = make_rollout(
            arrays,
            others,
            identifier=self._selection.name(record),
            group_id=group_id,
            reward=reward,
            default_temperature=self._checks.default_temperature,
        )
        return _completed(rollout, self._checks)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the ids of documents without reading the documents."""
        selection = self._selection
        records = selection.records[start:stop]
        if not len(records):
            return []
        own = selection.column("id").take(pa.array(records)).to_pylist()
        lines = selection.column("line").take(pa.array(records)).to_pylist()
        tables = (np.searchsorted(selection._starts, records, "right") - 1).tolist()
        return [
            f"{selection.names[table]}:{line}" if name is None else name
            for name, line, table in zip(own, lines, tables, strict=True)
        ]

    def digests(self, start: int, stop: int) -> list[bytes]:
        """Return the digests of tokens and labels that the conversion stored."""
        records = self._selection.records[start:stop]
        found: list[bytes] = (
            self._selection.column("digest").take(pa.array(records)).to_pylist() if len(records) else []
        )
        return found


def _completed(rollout: Rollout, checks: Checks) -> Rollout:
    """Fill needed fields that a document without labels lacks with zeros, as `parse_record` does."""
    zeros, needs = np.zeros(rollout.num_tokens, dtype=np.float32), checks.needs
    if needs.logprobs and rollout.logprobs is None:
        rollout = replace(rollout, logprobs=zeros)
    from_group = (
        as_rule(needs.advantage_rule).from_rewards and rollout.reward is not None and rollout.group_id is not None
    )
    if needs.advantages and rollout.advantages is None and not from_group:
        rollout = replace(rollout, advantages=zeros)
    return with_defaults(rollout, checks.fields)
