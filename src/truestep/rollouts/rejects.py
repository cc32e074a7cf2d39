"""`rejected.jsonl`: the records that were never trained on, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from truestep.types import Rejected

FILE_NAME = "rejected.jsonl"


def write_rejected(directory: str | Path, rejected: Iterable[Rejected], append: bool = False) -> Path:
    """Write `rejected.jsonl` in `directory`, or add to the one there. A kill at any instant leaves the old or the new.

    Without `append` a file of an earlier run is replaced, by an empty one where nothing was rejected.
    """
    path = Path(directory) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if append and path.exists() else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(before)
            file.writelines(_line(record) for record in rejected)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _line(record: Rejected) -> bytes:
    content = {"file": record.file, "line": record.line, "reason": record.reason, "id": record.id}
    return json.dumps(content).encode("ascii") + b"\n"  # escaped: a file's name need not be valid Unicode
