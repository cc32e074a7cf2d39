"""Compact forms of the data in a run's files: columns of numbers, counts of reasons, and eight bytes for each
document."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from truestep.text import printable

LARGEST_VALUE = 1e300
MOST_COLUMNS = 1000  # a limit for damaged files, where each line could have a new metric
MOST_REASONS = 1000
LONGEST_REASON = 120


def number(record: Mapping[str, Any], key: str) -> float | None:
    """Return the number under `key`; None for NaN and for any other value."""
    value = _as_number(record.get(key))
    return None if math.isnan(value) else value


def _as_number(value: Any) -> float:
    """Convert a number to float; NaN for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    # A larger value comes from an overflow, and a sum that includes it would overflow too.
    if abs(value) > LARGEST_VALUE:
        return math.inf if value > 0 else -math.inf
    return float(value)


def finite(record: Mapping[str, Any], key: str) -> float | None:
    value = number(record, key)
    return value if value is not None and math.isfinite(value) else None


class Table:
    """The numbers of records that have a step, in one column per name. A later record of a step replaces an earlier
    one."""

    def __init__(self) -> None:
        self.repeated = 0  # the number of replaced records
        self.left_out = 0  # the number of names that did not fit in `MOST_COLUMNS`
        self.steps = np.empty(0)  # [R] increasing
        self._rows = array("d")
        self._columns: dict[str, array[float]] = {}
        # A "run" here is a sequence of consecutive records with the same names. For each: its first row, and the names.
        self._runs: list[tuple[int, tuple[str, ...]]] = []
        self._filled: list[array[float]] = []  # the columns that the current records fill
        self._order = np.empty(0, dtype=np.int64)  # [R] the rows that were not replaced, sorted by step

    def add(self, record: Mapping[str, Any], step: float) -> None:
        names = tuple(record)
        if not self._runs or names != self._runs[-1][1]:
            names = self._begin_run(names)
        row = record.values() if len(names) == len(record) else [record[name] for name in names]
        self._rows.append(step)
        for column, value in zip(self._filled, row, strict=True):
            # Most values pass this fast test. `_as_number`, which is slower, handles the others.
            plain = type(value) is float and -LARGEST_VALUE < value < LARGEST_VALUE
            column.append(value if plain else _as_number(value))

    def _begin_run(self, names: tuple[str, ...]) -> tuple[str, ...]:
        kept = tuple(name for name in names if name in self._columns or self._new_column(name))
        if not self._runs or kept != self._runs[-1][1]:
            self._runs.append((len(self._rows), kept))
            self._filled = [self._columns[name] for name in kept]
        return kept

    def _new_column(self, name: str) -> bool:
        if len(self._columns) >= MOST_COLUMNS:
            self.left_out += 1
            return False
        self._columns[name] = array("d")
        return True

    def finish(self) -> None:
        """Sort by step, and keep the last row of each step."""
        rows = np.frombuffer(self._rows) if self._rows else np.empty(0)
        order = np.argsort(rows, kind="stable")
        last = np.append(rows[order][1:] != rows[order][:-1], True) if len(rows) else np.empty(0, dtype=bool)
        self._order = order[last]
        self.steps = rows[self._order]
        self.repeated = len(rows) - len(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices into `steps` of the records with this name, and their values; NaN if not a number."""
        if name not in self._columns:
            return np.empty(0, dtype=np.int64), np.empty(0)
        values = np.frombuffer(self._columns[name]) if self._columns[name] else np.empty(0)
        if len(values) == len(self._rows):  # every record has it
            return np.arange(len(self._order)), values[self._order]
        ends = [*(start for start, _ in self._runs[1:]), len(self._rows)]
        runs = zip(self._runs, ends, strict=True)
        rows = np.concatenate([np.arange(start, end) for (start, names), end in runs if name in names])
        places = np.full(len(self._rows), -1, dtype=np.int64)
        places[rows] = np.arange(len(rows))
        found = places[self._order]
        there = np.flatnonzero(found >= 0)
        return there, values[found[there]]

    def value(self, place: int, name: str) -> float | None:
        """Return a value of the record at an index into `steps`; None if missing, NaN if not a number."""
        places, values = self.column(name)
        index = int(np.searchsorted(places, place))
        return float(values[index]) if index < len(places) and places[index] == place else None


class Reasons:
    """Counts of at most `MOST_REASONS` reasons. All other reasons are counted together."""

    def __init__(self) -> None:
        self.total = 0
        self.counts: Counter[str] = Counter()
        self._shown: dict[str, str] = {}  # a cache of printable reasons, because most reasons occur often

    def add(self, given: object) -> None:
        self.total += 1
        reason = self._shown.get(given) if isinstance(given, str) else None
        if reason is None:
            reason = printable(given)[:LONGEST_REASON]
            if isinstance(given, str) and len(given) <= 10 * LONGEST_REASON and len(self._shown) < MOST_REASONS:
                self._shown[given] = reason
        known = reason in self.counts or len(self.counts) < MOST_REASONS
        self.counts[reason if known else "another reason"] += 1


def fingerprint(document: object) -> int:
    """Return a 64-bit hash of a document's identifier. Identifiers of different types differ: "1" and 1 are different
    documents."""
    return hash(document if type(document) is str else (type(document).__name__, repr(document)))


class Repeats:
    """Finds documents that occur more than once, by their fingerprints."""

    def __init__(self) -> None:
        self._fingerprints = array("q")

    def add(self, documents: list[Any]) -> None:
        # Nearly all identifiers are strings. Hashing them directly is faster than one call of `fingerprint` for each.
        of_text = set(map(type, documents)) <= {str}
        self._fingerprints.extend(map(hash if of_text else fingerprint, documents))

    def count(self, allowed: int, most: int = 100_000) -> tuple[int, int, int, set[int]]:
        """Return the number of distinct documents, the number of documents that occur more than `allowed` times, the
        largest number of occurrences, and at most `most` fingerprints of the documents that occur too often."""
        named = np.frombuffer(self._fingerprints, dtype=np.int64) if self._fingerprints else np.empty(0, dtype=np.int64)
        fingerprints, counts = np.unique(named, return_counts=True)
        often = counts > allowed
        largest = int(counts.max()) if len(counts) else 0
        return len(counts), int(often.sum()), largest, set(fingerprints[often][:most].tolist())


def first_of(documents: Iterable[Any], wanted: set[int], most: int) -> list[str]:
    """Return the names of the first `most` documents whose fingerprints are in `wanted`."""
    names: dict[str, None] = {}
    for document in documents:
        if len(names) == most:
            break
        if fingerprint(document) in wanted:
            names[repr(document)] = None
    return list(names)
