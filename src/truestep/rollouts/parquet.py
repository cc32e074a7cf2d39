"""Reading of rollout records from Parquet files, one record per row."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from truestep.files import bounded
from truestep.rollouts.fields import Field, record_names
from truestep.rollouts.pages import batches, checked_groups
from truestep.rollouts.record import identified
from truestep.rollouts.values import BadRecord, describe


def read_parquet(path: Path, declared: Sequence[Field] = ()) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, the record or a `BadRecord`). `declared` are the user's fields."""
    wanted = record_names(declared)
    with pq.ParquetFile(path, pre_buffer=False) as file:
        columns = [name for name in file.schema_arrow.names if name in wanted]
        repeated = next((name for name in columns if columns.count(name) > 1), None)
        if repeated is not None or not columns:
            # Every row is bad: reject each of them, as each line of the same JSONL would be.
            row: Any = BadRecord(f"the column {repeated!r} is given twice") if repeated is not None else {}
            rows = sum(group.rows for group in checked_groups(path, file.metadata, ()))
            yield from ((number, row) for number in range(1, rows + 1))
            return
        number = 0
        for group in checked_groups(path, file.metadata, columns):
            for batch in batches(file, columns, group):
                small = batch.nbytes <= bounded.RECORD
                for index in range(batch.num_rows):
                    number += 1
                    fits = small or batch.slice(index, 1).nbytes <= bounded.RECORD
                    long = BadRecord(f"the record is not read: {bounded.too_long()}")
                    yield number, _parse_row(batch, index) if fits else long


def _parse_row(batch: pa.RecordBatch, index: int) -> Any:
    row: dict[str, Any] = {}
    unreadable: str | None = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = _to_python(column[index])
        except Exception as error:  # invalid UTF-8, a date out of range, a map with a repeated key
            unreadable = f"{name} cannot be read: {describe(str(error))}"
    return row if unreadable is None else bad_row(unreadable, row)


def _to_python(scalar: Any) -> Any:
    elements: Any = getattr(scalar, "values", None)
    kind: Any = elements.type if isinstance(elements, pa.Array) and not elements.null_count else pa.null()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return elements.to_numpy(zero_copy_only=False).tolist()  # same result as to_pylist, many times faster
    array = _array_of(elements)
    return scalar.as_py(maps_as_pydicts="strict") if array is None else array


def _array_of(elements: Any) -> np.ndarray | None:
    """Return nested lists of integers as an array, or None for ragged lists, nulls or other values."""
    if not isinstance(elements, pa.Array) or not pa.types.is_nested(elements.type):
        return None
    shape = [len(elements)]
    while isinstance(elements, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        lengths = elements.value_lengths()
        if elements.null_count or not len(elements) or pc.min(lengths) != pc.max(lengths):
            return None
        shape.append(lengths[0].as_py())
        elements = elements.flatten()
    if elements.null_count or not pa.types.is_integer(elements.type):
        return None
    return elements.to_numpy(zero_copy_only=False).reshape(shape)


def bad_row(reason: str, trusted: dict[str, Any]) -> BadRecord:
    return identified(BadRecord(reason), trusted)
