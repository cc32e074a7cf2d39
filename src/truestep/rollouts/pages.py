"""Limits on the values, rows and memory of a Parquet file, checked from its page headers before decoding.

A few bytes of Parquet can decode to any number of values: run-length encoding repeats a value, and a dictionary page
holds a long text that many values refer to. The limits use the counts in page headers, which the decoder follows, not
those in the file's footer. Row groups that could take much memory are first decoded in a subprocess with a memory limit
(`python -m truestep.rollouts.pages`). Imports no torch.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from truestep.files.bounded import MIB

BATCH_ROWS = 128  # largest batch of decoded rows; rows become Python lists one at a time
_BATCH_BYTES = 64 * MIB  # target size of a decoded batch
_HARMLESS = 256 * MIB  # row groups whose bound is below this are not tried in a subprocess
_MOST_MEMORY = 4096 * MIB  # memory limit of the subprocess
_MOST_SECONDS = 3600  # CPU-time limit of the subprocess
_MOST_VALUES, _MOST_ROWS = (2**24, 4096), (2**20, 64)  # each limit is a constant plus this many per stored byte
_HEADER = MIB  # largest page header in bytes; a header may hold the page's minimum and maximum values
# Decoded bytes of a value, including its repetition and definition levels.
_WIDTHS = {"BOOLEAN": 8, "INT32": 8, "INT64": 8, "FLOAT": 8, "DOUBLE": 8, "INT96": 16}
_TEXT = 16  # bytes of a text's offset, including its levels
_DICTIONARY = 16 * MIB  # dictionaries above this size are not decompressed to find their longest text
# Encoding numbers. 0 (plain) and 6 (delta length) store each text whole; 2 and 8 store indices into a dictionary.
_PLAIN, _BY_DICTIONARY = (0, 6), (2, 8)


class ParquetError(OSError):
    """A Parquet file that is malformed or exceeds a limit."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Group:
    """A row group and the limits that its page headers imply."""

    number: int
    rows: int
    bytes: int  # upper bound of the decoded columns
    values: int = 0  # the number of values in the column with the most
    stored: int = 0  # bytes in the file

    @property
    def batch_rows(self) -> int:
        return max(1, min(BATCH_ROWS, _BATCH_BYTES * self.rows // max(self.bytes, 1)))


def checked_groups(path: Path, metadata: Any, columns: Sequence[str]) -> list[Group]:
    """Measure row groups from their page headers; raise `ParquetError` for a file that exceeds a limit."""
    with path.open("rb") as file:
        numbers = range(metadata.num_row_groups)
        found = [_measured(file, metadata.row_group(number), number, columns) for number in numbers]
    stored = min(sum(group.stored for group in found), path.stat().st_size)
    for what, count, (some, each) in (
        ("values", sum(group.values for group in found), _MOST_VALUES),
        ("rows", sum(group.rows for group in found), _MOST_ROWS),
    ):
        if count > some + each * stored:
            raise ParquetError(
                f"it says that it has {count:,} {what} in {stored:,} bytes: at most {some + each * stored:,} are read"
            )
    large = [group for group in found if group.bytes > _HARMLESS]
    if large:
        _try_to_decode(path, columns, large)
    return found


def _measured(file: BinaryIO, group: Any, number: int, columns: Sequence[str]) -> Group:
    size = os.fstat(file.fileno()).st_size
    chunks = [group.column(index) for index in range(group.num_columns)]
    if group.num_rows < 0 or any(chunk.total_compressed_size < 0 for chunk in chunks):
        raise ParquetError("one of its row groups has a size below 0")
    measured = [_measure_chunk(file, chunk, size) for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    values, taken = max((count for count, _ in measured), default=0), sum(taken for _, taken in measured)
    return Group(number, group.num_rows, taken, values, sum(chunk.total_compressed_size for chunk in chunks))


def _measure_chunk(file: BinaryIO, chunk: Any, size: int) -> tuple[int, int]:
    """Return the number of values in a column chunk and an upper bound of their decoded bytes."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    place, end = start, min(start + chunk.total_compressed_size, size)
    values = taken = longest = 0
    while place < end and values < chunk.num_values:
        page, length = _page_header(file, place)
        raw, stored = _integer(page, 2), _integer(page, 3)
        kind = next((kind for kind in (5, 7, 8) if isinstance(page.get(kind), dict)), None)
        place += length
        taken += raw
        if kind == 7:
            longest = _longest(file, place, stored, raw, chunk)
        elif kind is not None:
            count, encoding = _integer(page[kind], 1), _integer(page[kind], 2 if kind == 5 else 4)
            values += count
            taken += count * _bytes_of_value(chunk.physical_type, encoding, longest, raw)
        place += stored
    return values, taken


def _integer(fields: dict[int, Any], number: int) -> int:
    value = fields.get(number)
    if type(value) is not int or value < 0:
        raise ParquetError("the header of one of its pages cannot be read")
    return value


def _bytes_of_value(kind: str, encoding: int, longest: int, raw: int) -> int:
    """Return an upper bound of a decoded value's bytes.

    `longest` is the length of the dictionary's longest text, `raw` the page's uncompressed size.
    """
    if kind in _WIDTHS:
        return _WIDTHS[kind]
    if kind == "BYTE_ARRAY" and encoding in _PLAIN:
        return _TEXT
    # In other encodings (delta strings) a text can reuse a prefix of the previous text and so exceed its page.
    return _TEXT + (longest if encoding in _BY_DICTIONARY else 16 * raw)


def _longest(file: BinaryIO, place: int, stored: int, raw: int, chunk: Any) -> int:
    """Return the length of a dictionary page's longest text, or the page's size if it cannot be decompressed."""
    if chunk.physical_type != "BYTE_ARRAY" or raw > _DICTIONARY:
        return raw
    file.seek(place)
    content = file.read(stored)
    try:
        if chunk.compression != "UNCOMPRESSED":
            content = pa.decompress(content, raw, codec=chunk.compression.lower(), asbytes=True)
    except (OSError, ValueError, pa.ArrowException):
        return raw
    longest = start = 0
    while start + 4 <= len(content):
        length = int.from_bytes(content[start : start + 4], "little")
        longest, start = max(longest, length), start + 4 + length
    return min(longest, raw)


def _page_header(file: BinaryIO, place: int) -> tuple[dict[int, Any], int]:
    """Return a page header's fields by number, and the header's length in bytes."""
    for most in (512, _HEADER):
        file.seek(place)
        content = file.read(most)
        try:
            return _Thrift(content).header()
        except IndexError:
            continue
    raise ParquetError("the header of one of its pages cannot be read")


class _Thrift:
    """A reader of the part of Thrift's compact protocol that page headers use. Truncated bytes raise IndexError."""

    def __init__(self, content: bytes):
        self._content, self._place = content, 0

    def header(self) -> tuple[dict[int, Any], int]:
        return self._struct(0), self._place

    def _byte(self) -> int:
        self._place += 1
        return self._content[self._place - 1]

    def _number(self) -> int:
        number = shift = 0
        while (byte := self._byte()) & 0x80:
            number |= (byte & 0x7F) << shift
            shift += 7
            if shift > 70:
                raise ParquetError("the header of one of its pages has a malformed number")
        return number | byte << shift

    def _struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        last = 0
        if depth > 8:
            raise ParquetError("the header of one of its pages is nested too deeply")
        while head := self._byte():
            last = last + (head >> 4) if head >> 4 else _signed(self._number())
            fields[last] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return _signed(self._number())
        if kind == 12:
            return self._struct(depth + 1)
        if kind in (3, 7, 8):
            length = {3: 1, 7: 8}.get(kind) or self._number()
            self._place += length
            if self._place > len(self._content):
                raise IndexError
            return None
        raise ParquetError("the header of one of its pages is malformed")


def _signed(number: int) -> int:
    return number >> 1 ^ -(number & 1)


def batches(file: Any, columns: Sequence[str], group: Group) -> Iterator[Any]:
    """Yield a row group's decoded rows in batches of about `_BATCH_BYTES`."""
    yield from file.iter_batches(
        batch_size=group.batch_rows, columns=list(columns), row_groups=[group.number], use_threads=False
    )


def _try_to_decode(path: Path, columns: Sequence[str], groups: Sequence[Group]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # other pools map more memory than they use
    given = [f"{group.number},{group.rows},{group.bytes}" for group in groups]
    command = [sys.executable, "-P", "-m", __name__, str(_MOST_MEMORY), str(path.absolute()), ",".join(columns), *given]
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise ParquetError(
            f"its row groups cannot be decoded in {_MOST_MEMORY // MIB} MiB of memory: what may take more is tried in "
            f"a process of its own, which ended with {said[-1] if said else f'exit status {result.returncode}'}"
        )


def main() -> None:
    """Decode row groups as the run will, under limits on memory and CPU time."""
    most, path, columns, *given = sys.argv[1:]
    with pq.ParquetFile(path, pre_buffer=False) as file:
        with open("/proc/self/statm", encoding="ascii") as usage:
            mapped = int(usage.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(most),) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
        for one in given:
            for _ in batches(file, columns.split(","), Group(*map(int, one.split(",")))):
                continue


if __name__ == "__main__":
    main()
