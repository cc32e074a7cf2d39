"""The layout of tables: the Arrow columns of a document, and their writer and reader.

A part of a table has two Arrow files with one row per record. `rows` has the columns that checks, order and groups
need. `values` has the token ids, the spans of labels, each array field at labels only, and all other fields as JSON.
Together they store every field of `Rollout`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from truestep.rollouts.documents import arrays, others_of, read_others, read_tuples, written
from truestep.rollouts.fields import TABLE, Field, declarations
from truestep.types import PLACES, Rollout

ABSENT_TEMPERATURE = -1.0  # marks a record without a temperature, which takes the run's when it is read
LABEL_ARRAYS = {name: kind for name, kind in arrays().items() if name not in ("input_ids", "loss_mask")}
_IN_ROWS = ("id", "group_id", "reward")
OTHERS = tuple(
    item.name for item in dataclasses.fields(Rollout) if item.name not in (*arrays(), *_IN_ROWS, *PLACES)
)  # stored as JSON
_DEFAULTS = {
    item.name: item.default_factory() if callable(item.default_factory) else item.default
    for item in dataclasses.fields(Rollout)
    if item.name in OTHERS
}


def format_of(declared: Sequence[Field]) -> str:
    """Return the name of a table's format, part of its cache key: other versions and other fields need a new table."""
    names = [f"{field.name}:{field.level}" for field in (*TABLE, *declared)]
    return f"2 {' '.join((*arrays(), *OTHERS, *names))} {declarations(declared)}"


ROWS = pa.schema(
    [
        ("line", pa.int64()),  # from 1
        ("offset", pa.int64()),  # of the line's first byte (JSONL)
        ("part", pa.int32()),
        ("index", pa.int32()),  # row in the part's values
        ("valid", pa.bool_()),
        ("num_tokens", pa.int64()),
        ("num_labels", pa.int64()),
        ("largest_id", pa.int64()),
        ("has", pa.large_string()),  # names of the fields present, each with a space before and after
        ("reward", pa.float64()),
        ("id", pa.large_string()),
        ("group_id", pa.large_string()),
        ("digest", pa.binary(16)),  # of input_ids and loss_mask
        ("checksum", pa.uint32()),  # of all stored values
    ]
)


def content_digest(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """Return the digest of a document's tokens and labels."""
    digest = hashlib.blake2b(input_ids.tobytes(), digest_size=16)
    digest.update(loss_mask.tobytes())
    return digest.digest()


def label_bounds(loss_mask: np.ndarray) -> np.ndarray:
    """Return the start and end of each span of labels, alternating. Example: `[F, T, T, F, T]` gives `[1, 3, 4, 5]`."""
    framed = np.zeros(len(loss_mask) + 2, bool)
    framed[1:-1] = loss_mask
    bounds: np.ndarray = np.flatnonzero(framed[1:] != framed[:-1]).astype(np.int32)
    return bounds


def mask_of(bounds: np.ndarray, num_tokens: int) -> np.ndarray:
    lengths = np.diff(bounds, prepend=0, append=num_tokens)
    mask: np.ndarray = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return mask


def at_labels(values: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Return the values at labels, or only the first value if all are identical bit for bit."""
    on_labels: np.ndarray = values[loss_mask]
    bits = on_labels.view(f"u{on_labels.itemsize}")
    return on_labels[:1] if len(bits) > 1 and (bits == bits[0]).all() else on_labels


def from_labels(stored: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    values = np.zeros(len(loss_mask), dtype=stored.dtype)
    values[loss_mask] = stored
    return values


def _others(rollout: Rollout) -> str:
    """Return the fields that are neither arrays nor columns and differ from their defaults, as JSON."""
    fields = {name: value for name in OTHERS if (value := getattr(rollout, name)) != _DEFAULTS[name]}
    return json.dumps({name: written(value) for name, value in fields.items()} | others_of(rollout))


def checksum(arrays: list[np.ndarray | None], others: str) -> int:
    """Return a CRC-32 of a document's stored values, to detect damage on reading."""
    total = crc32(others.encode())
    for position, array in enumerate(arrays):
        if position == 0 and array is not None:
            array = array.astype(np.int64)  # the stored width of ids depends on the other documents of the part
        total = crc32(b"-" if array is None else np.ascontiguousarray(array).data, total)
    return total


class PartWriter:
    """A writer that collects the records of one part and writes its two files."""

    def __init__(self, declared: Sequence[Field] = ()) -> None:
        self._fields = [field.name for field in (*TABLE, *declared) if field.has and field.source == "record"]
        self._rows: dict[str, list[Any]] = {name: [] for name in ROWS.names if name not in ("part", "index")}
        self._arrays: dict[str, list[np.ndarray | None]] = {name: [] for name in ("input_ids", "bounds", *LABEL_ARRAYS)}
        self._others: list[str] = []

    def _row(self, **columns: Any) -> None:
        for name, values in self._rows.items():
            values.append(columns.get(name))

    def add(self, line: int, offset: int, rollout: Rollout | None) -> None:
        """Add a record: its rollout (with an empty id if the record has none), or None for a bad record."""
        if rollout is None:
            self._refuse(line, offset)
            return
        ids, mask = rollout.input_ids, rollout.loss_mask
        largest = int(ids.max())
        stored: list[np.ndarray | None] = [ids.astype(np.int32 if largest < 2**31 else np.int64), label_bounds(mask)]
        for name in LABEL_ARRAYS:
            values = getattr(rollout, name)
            stored.append(None if values is None else at_labels(values, mask))
        for values_of, array in zip(self._arrays.values(), stored, strict=True):
            values_of.append(array)
        others = _others(rollout)
        self._others.append(others)
        self._row(
            line=line,
            offset=offset,
            valid=True,
            num_tokens=len(ids),
            num_labels=np.count_nonzero(mask),
            largest_id=largest,
            has=self._has(rollout),
            reward=rollout.reward,
            id=rollout.id or None,
            group_id=rollout.group_id,
            digest=content_digest(ids, mask),
            checksum=checksum(stored, others),
        )

    def _has(self, rollout: Rollout) -> str:
        return f" {' '.join(name for name in self._fields if rollout.value(name) is not None)} "

    def _refuse(self, line: int, offset: int) -> None:
        """Add the position of a bad record, which each run reads again from the file to report the reason."""
        for values in self._arrays.values():
            values.append(None)
        self._others.append("")
        self._row(line=line, offset=offset, valid=False)

    def write(self, path: Path) -> None:
        """Write `PATH.values` and `PATH.rows`."""
        columns = {name: _list_column(arrays, name) for name, arrays in self._arrays.items()}
        columns["others"] = pa.array(self._others, pa.large_string())
        write_arrow(path.with_suffix(".values"), pa.table(columns))
        count = len(self._others)
        fixed = {"part": np.zeros(count, np.int32), "index": np.arange(count, dtype=np.int32)}
        rows = {name: fixed[name] if name in fixed else self._rows[name] for name in ROWS.names}
        write_arrow(path.with_suffix(".rows"), pa.table(rows, schema=ROWS))


def _list_column(arrays: list[np.ndarray | None], name: str) -> pa.Array:
    present = [array for array in arrays if array is not None]
    kind = np.result_type(*present) if present else np.dtype(LABEL_ARRAYS.get(name, np.int32))
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    values = pa.array(np.concatenate([*present, np.zeros(0, kind)]).astype(kind, copy=False))
    absent = np.array([array is None for array in arrays] + [False])
    column = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    if not absent.any():
        return column
    return pa.LargeListArray.from_arrays(pa.array(offsets, mask=absent), values)


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.combine_chunks())


def map_arrow(path: Path) -> pa.Table:
    """Memory-map an Arrow file. All processes that map the file share its pages."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


class PartReader:
    """A reader of one part's values, as arrays in the mapped file."""

    def __init__(self, path: Path):
        table = map_arrow(path)
        self._arrays = {}
        for name in ("input_ids", "bounds", *LABEL_ARRAYS):
            column = table.column(name)
            array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
            present = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
            self._arrays[name] = (array.offsets.to_numpy(), array.values.to_numpy(), present)
        self._others = table.column("others")

    def stored(self, index: int) -> tuple[list[np.ndarray | None], str]:
        """Return a document's stored arrays and the JSON of its other fields."""
        arrays: list[np.ndarray | None] = []
        for offsets, values, present in self._arrays.values():
            there = present is None or present[index]
            arrays.append(values[offsets[index] : offsets[index + 1]] if there else None)
        return arrays, self._others[index].as_py()


def make_rollout(
    arrays: list[np.ndarray | None],
    others: str,
    *,
    identifier: str,
    group_id: str | None,
    reward: float | None,
    default_temperature: float,
) -> Rollout:
    """Build a document from its stored arrays, columns and other fields."""
    ids, bounds, *rest = arrays
    assert ids is not None and bounds is not None
    mask = mask_of(bounds, len(ids))
    on_labels: dict[str, Any] = {
        name: None if stored is None else from_labels(stored, mask)
        for name, stored in zip(LABEL_ARRAYS, rest, strict=True)
    }
    fields = json.loads(others)
    fields |= read_others(fields) | read_tuples(fields)
    if fields.get("temperature") == ABSENT_TEMPERATURE:
        fields["temperature"] = float(default_temperature)
    return Rollout(
        id=identifier,
        input_ids=ids.astype(np.int64),
        loss_mask=mask,
        reward=reward,
        group_id=group_id,
        **on_labels,
        **fields,
    )
