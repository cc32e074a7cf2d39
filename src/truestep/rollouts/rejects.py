"""The file `rejected.jsonl`: records that were never trained on, and why; and the kinds of their reasons."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from truestep.files import write_whole
from truestep.types import Rejected

FILE_NAME = "rejected.jsonl"


def write_rejected(directory: str | Path, rejected: Iterable[Rejected], append: bool = False) -> Path:
    """Write `rejected.jsonl`, or append to the one that is there. A kill at any instant leaves the old or the new file.

    Without `append` a file of an earlier run is replaced, by an empty one where nothing was rejected.
    """
    path = Path(directory) / FILE_NAME
    before = path.read_bytes() if append and path.exists() else b""
    if before and not before.endswith(b"\n"):
        before += b"\n"
    return write_whole(path, before + b"".join(_line(record) for record in rejected))


def _line(record: Rejected) -> bytes:
    content = {"file": record.file, "line": record.line, "reason": record.reason, "id": record.id}
    return json.dumps(content).encode("ascii") + b"\n"  # escaped: a file's name need not be valid Unicode


_PLACE = re.compile(r", first at .*$")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_NUMBER = re.compile(
    r"(?P<bound>(?:at most|at least|above|vocabulary of) [\d.e+]+|0 or 1)"
    r"|(?<![\w.])-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)(?!\w)"
)


def reason_kind(reason: str) -> str:
    """Strip a reason of its numbers and quoted values, bounds aside, so that it is the same for many bad records."""
    unquoted = _QUOTED.sub("…", _PLACE.sub("", reason))
    return _NUMBER.sub(lambda found: found[0] if found["bound"] else "…", unquoted)
