"""The file `rejected.jsonl`: rejected records with their reasons, and the grouping of reasons by kind."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from truestep.files.disks import writing
from truestep.files.whole import write_whole
from truestep.types import Rejected

FILE_NAME = "rejected.jsonl"
_BLOCK = 4096  # bytes per read when searching backwards for the last complete line


def write_rejected(directory: str | Path, rejected: Iterable[Rejected], append: bool = False) -> Path:
    """Write `rejected.jsonl`, or append to it.

    Without `append` the file is replaced atomically, even if nothing was rejected. The cost of appending does not
    depend on the file's length. A kill may leave an incomplete last line: the next append removes it, and a restart
    truncates the file to the checkpoint's position.
    """
    path = Path(directory) / FILE_NAME
    lines = b"".join(map(_line, rejected))
    if not append:
        return write_whole(path, lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), path.open("ab+") as file:
        _remove_torn_line(file)
        file.write(lines)
    return path


def _remove_torn_line(file: BinaryIO) -> None:
    """Remove an incomplete last line, which only a killed process can have left."""
    end = position = file.seek(0, os.SEEK_END)
    while position:
        start = max(position - _BLOCK, 0)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position < end:
        file.truncate(position)
    file.seek(position)


def _line(record: Rejected) -> bytes:
    content = {"file": record.file, "line": record.line, "reason": record.reason, "id": record.id}
    if record.traceback is not None:
        content["traceback"] = record.traceback
    return json.dumps(content).encode("ascii") + b"\n"  # escaped: a file's name need not be valid Unicode


_PLACE = re.compile(r", first at .*$")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NUMBER = re.compile(
    r"(?P<bound>(?:at most|at least|above|vocabulary of) [\d.e+]+|0 or 1)"
    r"|(?<![\w.])-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)(?!\w)"
)


def reason_kind(reason: str) -> str:
    """Return a reason without quoted values and numbers (except bounds), to group similar rejections."""
    unquoted = _QUOTED.sub("…", _PLACE.sub("", reason))
    return _NUMBER.sub(lambda found: found[0] if found["bound"] else "…", unquoted)
