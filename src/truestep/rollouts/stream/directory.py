"""A transport without a server: messages are the lines of files that appear in a watched directory.

A sender renames a whole file to `NAME.jsonl`, or appends whole lines to it. A line without its end is still being
written: it is read when it has an end, or when a file `END` says that nothing more comes.
"""

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from truestep.files import append_json_line
from truestep.rollouts.source import SourceError, other_source
from truestep.rollouts.stream.transport import Message, TransportError

EVENTS, END, SUFFIX = "events.jsonl", "END", ".jsonl"
_FIRST_LOOK, _LONGEST_LOOK = 0.01, 0.5  # seconds between looks into the directory
_REPLACED = "the file was replaced after it had been read: each needs a name of its own"
_MARK = b"\xef\xbb\xbf"  # of the byte order, as some editors write


@dataclass(frozen=True)
class _Read:
    """The part of a file that was read."""

    lines: int = 0
    size: int = 0  # bytes


class DirectoryTransport:
    def __init__(self, directory: Path):
        if not directory.is_dir():
            raise SourceError(f"data.source.directory: {directory} is not a directory: make it before the run starts")
        self._directory = directory
        self.name = f"the directory {directory}"
        self.ended = False
        self._files: dict[str, _Read] = {}
        self._acknowledged: set[str] = set()
        self._outbox: deque[dict[str, Any]] = deque()
        self._unfinished: str | None = None  # a file whose last line has no end

    def fetch(self, count: int, seconds: float) -> list[Message]:
        deadline, pause = time.monotonic() + seconds, _FIRST_LOOK
        while True:
            ends = (self._directory / END).exists()  # looked for first: what is there before it is all there
            messages = self._look(count, ends)
            if messages:
                return messages
            if ends:
                self.ended = True
                return []
            if (left := deadline - time.monotonic()) <= 0:
                return []
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_LOOK)

    def _look(self, count: int, ends: bool) -> list[Message]:
        messages: list[Message] = []
        self._unfinished = None
        sizes = self._sizes()
        self._files = {name: read for name, read in self._files.items() if name in sizes}
        for name in sorted(sizes):
            if len(messages) < count and sizes[name] != self._files.get(name, _Read()).size:
                messages += self._lines(name, sizes[name], count - len(messages), ends)
        return messages

    def _sizes(self) -> dict[str, int]:
        """Measure every file that holds records, in bytes."""
        try:
            with os.scandir(self._directory) as entries:
                return {
                    entry.name: entry.stat().st_size
                    for entry in entries
                    if entry.name.endswith(SUFFIX) and entry.name[0] != "." and entry.name != EVENTS and entry.is_file()
                }
        except OSError as error:  # also a file that was removed between the two looks
            raise TransportError(f"{self.name} cannot be read: {error}") from error

    def _lines(self, name: str, size: int, count: int, ends: bool) -> list[Message]:
        path, read = self._directory / name, self._files.get(name, _Read())
        messages: list[Message] = []
        try:
            with path.open("rb") as file:
                if not _continues(file, size, read):
                    self._files[name] = _Read(read.lines, size)
                    return [Message(f"{name}:{read.lines}", str(path), read.lines, b"", _REPLACED)]
                while len(messages) < count and (line := file.readline()):
                    if not line.endswith(b"\n") and not ends:
                        self._unfinished = name
                        break
                    read = _Read(read.lines + 1, read.size + len(line))
                    if read.lines == 1:
                        line = line.removeprefix(_MARK)
                    if line.strip():
                        messages.append(Message(f"{name}:{read.lines}", str(path), read.lines, line))
        except OSError as error:
            raise TransportError(f"{path} cannot be read: {error}") from error
        self._files[name] = read
        return messages

    def state(self) -> dict[str, Any]:
        return {"files": {name: [read.lines, read.size] for name, read in self._files.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        if "files" not in state:
            raise other_source("data.source", "a stream", "a watched directory")
        self._files = {name: _Read(*read) for name, read in state["files"].items()}

    def acknowledge(self, state: dict[str, Any]) -> None:
        """Tell the senders which files are finished and may be removed."""
        try:
            sizes = self._sizes()
        except TransportError:
            return  # the next checkpoint's state has them too
        done = [name for name, (_, size) in state["files"].items() if sizes.get(name) == size]
        new = [name for name in done if name not in self._acknowledged]
        self._acknowledged = set(done)
        if new:
            self.announce({"event": "acknowledged", "files": new})

    def announce(self, event: dict[str, Any]) -> None:
        self._outbox.append(event)
        try:
            _end_last_line(self._directory / EVENTS)
            while self._outbox:
                append_json_line(self._directory / EVENTS, self._outbox[0])
                self._outbox.popleft()
        except OSError:
            return  # with the next event; documents matter more

    def hint(self) -> str | None:
        if self._unfinished:
            return f"the last line of {self._unfinished} has no end: it counts as still being written"
        return f"files are read whose names end in {SUFFIX}"

    def close(self) -> None: ...


def _continues(file: BinaryIO, size: int, read: _Read) -> bool:
    """Move to where reading goes on; false where another file has taken the name of one that was read."""
    file.seek(max(read.size - 1, 0))
    return size >= read.size and (read.size == 0 or file.read(1) == b"\n")


def _end_last_line(path: Path) -> None:
    """End a half line that a power cut may have left: the next line would continue it."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
