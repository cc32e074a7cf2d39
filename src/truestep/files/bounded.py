"""Ceilings on what is read of bytes that others wrote: lines, JSON, small files. SECURITY.md has a table of them all.

An honest document of a million tokens is far below them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

MIB = 2**20
RECORD = 128 * MIB  # bytes of a line, a message or a row: one record
TOKEN_FIELD = 96 * MIB  # bytes of the numbers of one document's tokens, such as routed_experts
SETTINGS = 16 * MIB  # bytes of a JSON file of settings
_PIECE = MIB
_UNCOUNTED = MIB  # bytes of JSON that are harmless whatever they hold
_MOST_PARTS = MIB  # lists and objects of a JSON text: one takes 60 bytes and more in memory, and 3 as text
_MOST_QUOTES = 4 * MIB  # two for each text: one takes 50 bytes and more in memory


class TooLargeError(ValueError):
    """The reason why bytes are not read: they are more, or would take more memory, than anything honest."""


def read_line(
    file: BinaryIO, each: Callable[[bytes], None] = lambda piece: None, limit: int | None = None
) -> tuple[bytes | None, int, bool]:
    """Read a line: its content (None where it has more bytes than a record may have, or than `limit`), its length,
    whether it has an end. No more than that is held; each piece is handed to `each`."""
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
    """Read all lines behind a file's place: each with its length, and None for the content of one that is too long."""
    while True:
        line, length, _ = read_line(file)
        if not length:
            return
        yield line, length


def too_long(limit: int | None = None) -> str:
    """Say why so many bytes are not read."""
    limit = RECORD if limit is None else limit
    return f"it has more than {limit // MIB} MiB" if limit >= MIB else f"it has more than {limit:,} bytes"


def check_json(text: bytes, scale: int = 1) -> None:
    """Refuse JSON that would take far more memory than its bytes. `scale` times as much is expected as of a record."""
    if len(text) <= _UNCOUNTED:
        return
    for count, most, what in (
        (text.count(b"[") + text.count(b"{"), scale * _MOST_PARTS, "lists and objects"),
        (text.count(b'"') // 2, scale * _MOST_QUOTES // 2, "texts"),
    ):
        if count > most:
            raise TooLargeError(f"it has {count:,} {what}: at most {most:,} are read")


def load_json(text: bytes, scale: int = 1) -> Any:
    """Read JSON. What cannot be read, or must not be, is a ValueError."""
    check_json(text, scale)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested without end") from None


def read_settings(path: Path, limit: int | None = None) -> bytes:
    """Read a file of settings, which is small."""
    most = SETTINGS if limit is None else limit
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLargeError(f"{path.name} cannot be used: {too_long(most)}")
    return content
