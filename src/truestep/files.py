"""Files that are whole or absent: written under another name, synced, renamed."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from truestep import progress


def sync_directory(directory: Path) -> None:
    """Make a rename in this directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Sync all files below, before a rename makes them count."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            with progress.waiting_for(f"the disk to write {path}"), path.open("rb") as file:
                os.fsync(file.fileno())
            progress.made("files on the disk")
        sync_directory(Path(folder))


def write_whole(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)
    return path


def write_text_whole(path: Path, text: str) -> Path:
    """Write text that people read: half a surrogate pair in a completion must not stop it."""
    return write_whole(path, text.encode("utf-8", errors="replace"))


def json_line(value: Mapping[str, Any]) -> str:
    """Format one line. Floats keep every digit, so that what is read is bit for bit what was written."""
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # JSON has no NaN and no infinity
        value = finite_or_null(value)
        line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and UTF-8 cannot
        line = json.dumps(value)
    return line + "\n"


def finite_or_null(value: Any) -> Any:
    """Replace numbers that are not finite, at any depth, by None: JSON has none of them."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json_line(value))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines: a last line cut short by a kill is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]
