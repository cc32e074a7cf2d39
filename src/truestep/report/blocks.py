"""Numbers of many lines at once, where lines are plain: all of the same names, each with a number, true, false or null.

So are nearly all lines of a long run's metrics. Arrow reads them several times as fast as one by one. Lines that it
might read otherwise than Python's json are left to that, with all lines around them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from truestep.files import Line, scan_lines
from truestep.report.tables import LARGEST_VALUE

_BLOCK = 1 << 20  # bytes
_SHORTEST = 1 << 22  # a smaller file is read before Arrow is imported


@dataclass(frozen=True)
class Block:
    """The numbers of some lines. NaN stands for what is no number."""

    columns: dict[str, np.ndarray]  # [lines] each

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


def scan_blocks(path: Path) -> Iterator[Block | Line]:
    """Read a file of lines: plain ones as blocks of numbers, and all others one by one."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    start, number = 0, 1
    with file:
        if path.stat().st_size >= _SHORTEST:
            while content := file.read(_BLOCK):
                whole = content[: content.rfind(b"\n") + 1]
                if not whole:
                    break  # a line longer than a block, or the last one, which is cut off
                if (block := _block_of(whole)) is not None:
                    yield block
                else:
                    yield from scan_lines(path, lenient=True, start=start, first=number, stop=start + len(whole))
                start, number = start + len(whole), number + whole.count(b"\n")
                file.seek(start)
    yield from scan_lines(path, lenient=True, start=start, first=number)


def _block_of(lines: bytes) -> Block | None:
    """Parse whole lines; None where they are not plain, or not surely so."""
    import pyarrow
    from pyarrow import json

    # One object a line: within an object there is no line break between } and {.
    if not lines.startswith(b"{") or lines.count(b"}\n{") + 1 != lines.count(b"\n") or not lines.endswith(b"}\n"):
        return None
    # Nothing nested: a name that has such a letter leads to the slow way, which is no harm.
    if lines.count(b"{") != lines.count(b"\n") or b"[" in lines:
        return None
    try:
        lines.decode()
        table = json.read_json(
            pyarrow.BufferReader(lines),
            read_options=json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        )
    except (pyarrow.ArrowException, UnicodeDecodeError):
        return None
    columns = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        found = _numbers(column.combine_chunks())
        if found is None or "null" in name:
            return None
        columns[name] = found
    # A null that is written is a gap; of a name that a line lacks nothing is known.
    if sum(column.null_count for column in table.columns) != lines.count(b"null"):
        return None
    return Block(columns) if columns and table.num_rows == lines.count(b"\n") else None


def _numbers(column: Any) -> np.ndarray | None:
    """Give a column of Arrow as float64; None where it is no plain numbers, or one is not finite or an overflow."""
    from pyarrow import types

    if types.is_null(column.type) or types.is_boolean(column.type):
        return np.full(len(column), np.nan)
    if not types.is_int64(column.type) and not types.is_float64(column.type):
        return None
    values: np.ndarray = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    if not (np.abs(values) <= LARGEST_VALUE).all():
        return None
    if column.null_count:
        values[column.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return values
