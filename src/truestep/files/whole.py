"""Atomic writes of files (temporary name, fsync, rename), and JSON Lines files, which may be damaged."""

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.files.bounded import read_line
from truestep.files.disks import writing
from truestep.process import progress
from truestep.text import printable

log = logging.getLogger(__name__)

# most levels of nested lists and objects in a line; Python's json fails at a depth that depends on the stack
DEEPEST = 100
_READ_AHEAD = 1 << 17  # bytes
LONGEST_LINE = 1 << 28  # bytes; a step of a million documents with long names takes a third of this


def sync_directory(directory: Path) -> None:
    """Make a rename in this directory survive a power cut."""
    with writing(directory):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_files(files: Iterable[Path]) -> None:
    """Sync files. Files that do not exist are skipped."""
    for path in files:
        with contextlib.suppress(FileNotFoundError), writing(path), path.open("rb") as file:
            os.fsync(file.fileno())


def sync_tree(directory: Path) -> None:
    """Sync all files in a directory tree. For use before it is renamed to its final name."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            with progress.waiting_for(f"the disk to write {path}"), writing(path), path.open("rb") as file:
                os.fsync(file.fileno())
            progress.made("files on the disk")
        sync_directory(Path(folder))


def write_whole(path: Path, content: bytes) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            with contextlib.suppress(OSError):  # an error here must not hide the error of the write
                partial.unlink(missing_ok=True)
    sync_directory(path.parent)
    return path


def write_text_whole(path: Path, text: str) -> Path:
    """Write text for people. Characters that UTF-8 cannot encode, such as lone surrogates, are replaced."""
    return write_whole(path, text.encode("utf-8", errors="replace"))


def json_line(value: Mapping[str, Any]) -> str:
    """Format a line. Floats keep all digits, so that reading gives the same bits. NaN and infinity become null."""
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # JSON has no NaN and no infinity
        value = finite_or_null(value)
        line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, but UTF-8 cannot encode it
        line = json.dumps(value)
    return line + "\n"


def finite_or_null(value: Any) -> Any:
    """Replace NaN and infinity, at any depth, by None, since JSON does not have them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_or_null(item) for name, item in value.items()}
    return [finite_or_null(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    write_text_whole(path, json.dumps(finite_or_null(value), indent=2) + "\n")


def write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    write_whole(path, "".join(map(json_line, lines)).encode())


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json_line(value))


class LineError(ValueError):
    """A line is not a valid JSON object; the message says why."""


def exact_object(line: bytes, *, lenient: bool = False) -> dict[str, Any]:
    """Parse a JSON object strictly: a repeated key, NaN, or deep nesting raises `LineError`.

    `lenient` is for files that are only displayed: it accepts NaN, and takes the last value of a repeated key.
    """

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        inside = dict(pairs)
        if len(inside) < len(pairs):
            names = [name for name, _ in pairs]
            raise LineError(f"the key {printable(next(n for n in names if names.count(n) > 1), 60)!r} is given twice")
        return inside

    try:
        if lenient:
            value = json.loads(line.decode())
        else:
            value = json.loads(line.decode(), object_pairs_hook=to_dict, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 at its byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg.removesuffix(' at')} at its column {error.colno}") from None
    except RecursionError:
        raise LineError(f"nested deeper than {DEEPEST} levels") from None
    except LineError:
        raise
    except ValueError as error:  # for example, an integer of thousands of digits
        raise LineError(f"not readable: {printable(error)}") from None
    if not isinstance(value, dict):
        raise LineError("not a JSON object")
    if line.count(b"[") + line.count(b"{") > DEEPEST and _deeper_than(value, DEEPEST):
        raise LineError(f"nested deeper than {DEEPEST} levels")
    return value


def _refuse_constant(name: str) -> None:
    raise LineError(f"{name} is no JSON")


def _deeper_than(value: Any, limit: int) -> bool:
    """Tell whether lists and objects are nested deeper than a limit, without recursion."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for item in level:
            parts = item.values() if isinstance(item, dict) else item
            inner += [part for part in parts if isinstance(part, dict | list)]
        if not inner:
            return False
        level = inner
    return True


@dataclass(frozen=True)
class Line:
    """A line of a file: its position, and its object or its damage."""

    path: Path
    number: int | None  # from 1; None: the file was read backwards
    start: int  # offset of its first byte
    end: int  # offset of the byte after its line break
    value: dict[str, Any] | None  # None: the line is damaged
    damage: str = ""
    whole: bool = True  # False: the last line has no line break, because the process was killed while writing it

    @property
    def place(self) -> str:
        number = "" if self.number is None else f":{self.number}"
        return f"{self.path}{number} (byte {self.start})"

    def __str__(self) -> str:
        return f"{self.place} is damaged: {self.damage}"


def _line_of(path: Path, number: int | None, start: int, content: bytes, lenient: bool = False) -> Line | None:
    """Parse the bytes of a line, including its line break. Return None for an empty line."""
    end, whole = start + len(content), content.endswith(b"\n")
    if not content.strip():
        return None if whole else Line(path, number, start, end, None, "the last line is cut off", whole=False)
    if len(content) > LONGEST_LINE:
        return Line(path, number, start, end, None, f"it is longer than {LONGEST_LINE:,} bytes", whole)
    if not whole and not lenient:
        return Line(path, number, start, end, None, "the last line is cut off", whole=False)
    try:
        return Line(path, number, start, end, exact_object(content, lenient=lenient), whole=whole)
    except LineError as error:
        return Line(path, number, start, end, None, str(error), whole)


def scan_lines(path: Path, *, lenient: bool = False) -> Iterator[Line]:
    """Yield the lines of a JSON Lines file one at a time. Damaged lines come with the reason. A missing file has no
    lines.

    `lenient` is for files that are only displayed: it accepts NaN, and a complete last line without a line break.
    """
    try:
        file = path.open("rb", buffering=_READ_AHEAD)
    except FileNotFoundError:
        return
    start = 0
    with file:
        for number in itertools.count(1):
            content, length, whole = read_line(file, limit=LONGEST_LINE)
            if not length:
                return
            end = start + length
            if content is None:
                yield Line(path, number, start, end, None, f"it is longer than {LONGEST_LINE:,} bytes", whole)
            elif (line := _line_of(path, number, start, content, lenient)) is not None:
                yield line
            start = end


def lines_from_the_end(path: Path, block: int = 1 << 16) -> Iterator[Line]:
    """Yield the lines of a JSON Lines file, the last line first. The file is read only as far as lines are consumed."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        blocks: list[bytes] = []  # parts of the current line, the last part first
        while position > 0:
            size = min(block, position)
            position -= size
            file.seek(position)
            content = file.read(size)
            end = len(content)
            while (found := content.rfind(b"\n", 0, end)) >= 0:
                tail = content[found + 1 : end] + b"".join(reversed(blocks))
                line = _line_of(path, None, position + found + 1, tail) if tail else None
                if line is not None:
                    yield line
                # The line break belongs to the line before it.
                blocks, end = [b"\n"], found
            blocks.append(content[:end])
        first = b"".join(reversed(blocks))
        if first and (line := _line_of(path, None, 0, first)) is not None:
            yield line


def count_lines(path: Path) -> int:
    """Count the line breaks of a file; 0 if it does not exist."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read all valid lines. A last line without a line break is skipped; a damaged line is skipped with a warning."""
    lines, damaged = [], []
    for line in scan_lines(path):
        if line.value is not None:
            lines.append(line.value)
        elif line.whole:
            damaged.append(line)
    if damaged:
        more = f" (and {len(damaged) - 1} more lines)" if len(damaged) > 1 else ""
        log.warning("%s%s; left out, %d lines are read", damaged[0], more, len(lines))
    return lines


def lines_by_step(
    path: Path, wanted: Callable[[dict[str, Any]], bool] = lambda line: True
) -> dict[int, dict[str, Any]]:
    """Read all valid lines that have a step and are `wanted`, by their step. Of several, the last one counts."""
    return {line["step"]: line for line in read_json_lines(path) if type(line.get("step")) is int and wanted(line)}


def read_exact_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield all lines of a file. Raise `LineError` at the first damaged line."""
    for line in scan_lines(path):
        if line.value is None:
            raise LineError(str(line))
        yield line.value


def cut_file(path: Path, size: int) -> None:
    """Truncate a file to its first `size` bytes, and sync it."""
    with writing(path), path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) != size:
            file.truncate(size)
            os.fsync(file.fileno())
