"""Records of prompts that an environment makes itself. They are sent to the run in parts.

Imports no torch, because environments run in processes without torch.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTES = 2**20  # a part ends when it is larger than this
_SECONDS = 1.0  # a part ends after this time, because each call has a time limit; all rows together have none
MOST_ROWS = 1_000_000
_dumps = json.dumps  # bound at import, before a user's code can replace it


@dataclass(frozen=True)
class Rows:
    """Some of the rows that an environment makes."""

    rows: list[dict[str, Any]]
    is_last: bool
    is_none: bool  # the environment makes no rows


class RowParts:
    """The parts of an environment's rows, in the process that makes them."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] | None):
        self._is_none = rows is None
        self._rows = iter(() if rows is None else rows)
        self._count = 0

    def next(self) -> dict[str, Any]:
        """Return the next part: {"rows": [...], "is_last": ..., "is_none": ...}."""
        made: list[dict[str, Any]] = []
        size, end = 0, time.monotonic() + _SECONDS
        for row in self._rows:
            self._count += 1
            if not isinstance(row, Mapping) or "prompt" not in row:
                raise TypeError(f"row {self._count} is {row!r:.200}, and a row is a mapping with the key `prompt`")
            if self._count > MOST_ROWS:
                raise ValueError(f"it makes more than {MOST_ROWS:,} rows: they have to end")
            size += len(_dumps(row, allow_nan=False, default=_refuse))
            made.append(dict(row))
            if size > _BYTES or time.monotonic() > end:
                return {"rows": made, "is_last": False, "is_none": False}
        return {"rows": made, "is_last": True, "is_none": self._is_none}


def _refuse(value: Any) -> Any:
    raise TypeError(f"a row holds {value!r:.200}, of type {type(value).__name__}, which JSON cannot hold")


def rows_from(given: Mapping[str, Any]) -> Rows:
    """Read a part of the rows from an answer. Raises ValueError if it is invalid."""
    rows, is_last, is_none = given["rows"], given["is_last"], given["is_none"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "prompt" in row for row in rows):
        raise ValueError("rows that are no records of prompts")
    if type(is_last) is not bool or type(is_none) is not bool or len(rows) > MOST_ROWS:
        raise ValueError("not a part of rows")
    return Rows(rows, is_last, is_none)
