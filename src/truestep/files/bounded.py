"""Size limits for untrusted input: lines, JSON, small files. SECURITY.md has a table of them all.

A legitimate document of a million tokens is far below them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MIB = 2**20
RECORD = 128 * MIB  # bytes of a line, a message or a row: one record
TOKEN_FIELD = 96 * MIB  # bytes of a field with numbers per token, such as routed_experts
SETTINGS = 16 * MIB  # bytes of a JSON file of settings
# The errors that other content can raise if it is read as a file that truestep wrote.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_PIECE = MIB
_UNCOUNTED = MIB  # shorter JSON is harmless, whatever it contains
# most lists and objects in a JSON text; each takes at least 60 bytes of memory, but only 3 bytes of text
_MOST_PARTS = MIB
_MOST_QUOTES = 4 * MIB  # most quotes; a string has two, and takes at least 50 bytes of memory


class TooLargeError(ValueError):
    """Input exceeds a size limit, in bytes or in the memory that it would take."""


def read_line(
    file: BinaryIO, each: Callable[[bytes], None] = lambda piece: None, limit: int | None = None
) -> tuple[bytes | None, int, bool]:
    """Read a line. Return its content (None if it has more than `limit` bytes), its length, and whether it ends with
    a line break. `limit` None: `RECORD`. `each` is called with all bytes, in parts. At most `limit` bytes are in
    memory."""
    limit = RECORD if limit is None else limit
    line = file.readline(limit + 1)
    each(line)
    length, piece = len(line), line
    while length > limit and piece and not piece.endswith(b"\n"):
        piece = file.readline(_PIECE)
        each(piece)
        length += len(piece)
    return None if length > limit else line, length, piece.endswith(b"\n")


def read_lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """Yield the content and length of each line from the file's current position. The content is None if the line is
    too long."""
    while True:
        line, length, _ = read_line(file)
        if not length:
            return
        yield line, length


def too_long(limit: int | None = None) -> str:
    """Return the message for input of more than `limit` bytes (None: `RECORD`)."""
    limit = RECORD if limit is None else limit
    return f"it has more than {limit // MIB} MiB" if limit >= MIB else f"it has more than {limit:,} bytes"


def check_json(text: bytes, scale: int = 1) -> None:
    """Raise `TooLargeError` for JSON that would take far more memory than its text. `scale` multiplies the limits."""
    if len(text) <= _UNCOUNTED:
        return
    for count, most, what in (
        (text.count(b"[") + text.count(b"{"), scale * _MOST_PARTS, "lists and objects"),
        (text.count(b'"') // 2, scale * _MOST_QUOTES // 2, "texts"),
    ):
        if count > most:
            raise TooLargeError(f"it has {count:,} {what}: at most {most:,} are read")


def load_json(text: bytes, scale: int = 1) -> Any:
    """Parse JSON. Raise ValueError if it is invalid or exceeds the limits."""
    check_json(text, scale)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested without end") from None


def read_settings(path: Path, limit: int | None = None) -> bytes:
    """Read a file of settings. Raise `TooLargeError` if it has more than `limit` bytes (None: `SETTINGS`)."""
    most = SETTINGS if limit is None else limit
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLargeError(f"{path.name} cannot be used: {too_long(most)}")
    return content
