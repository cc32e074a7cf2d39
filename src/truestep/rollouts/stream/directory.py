"""A transport without a server: messages are the lines of files that appear in a watched directory.

A sender renames a whole file to `NAME.jsonl`, or appends whole lines to it. A line without its end is still being
written: it is read when it has an end, or when a file `END` says that nothing more comes.
"""

import errno
import os
import stat
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from truestep.files import append_json_line
from truestep.rollouts.source import SourceError, other_source
from truestep.rollouts.stream.transport import Message, TransportError
from truestep.text import printable

EVENTS, END, SUFFIX = "events.jsonl", "END", ".jsonl"
_FIRST_LOOK, _LONGEST_LOOK = 0.01, 0.5  # seconds between looks into the directory
_REPLACED = "the file was replaced after it had been read: each needs a name of its own"
_REMOVED = "the file was removed before all of it was read"
_LONGEST_LINE = 64 * 2**20  # bytes; a longer one is no record, and is not held in memory
_TOO_LONG = f"the line has more than {_LONGEST_LINE // 2**20} MiB"
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
        self.name = f"the directory {printable(directory)}"
        self.ended = False
        self._files: dict[str, _Read] = {}
        self._acknowledged: set[str] = set()
        self._outbox: deque[dict[str, Any]] = deque()
        self._unfinished: str | None = None  # a file whose last line has no end
        self._sizes_before: dict[str, int] = {}  # at the look before
        self._waiting_at: dict[str, int] = {}  # the size of a file when its last line was found to have no end
        self._unreadable: dict[str, str] = {}  # why a file cannot be read; said once, and tried again
        self._interrupted = threading.Event()

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
            if self._interrupted.is_set():
                return []
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_LOOK)

    def _look(self, count: int, ends: bool) -> list[Message]:
        messages: list[Message] = []
        self._unfinished = None
        sizes, broken = self._measure()
        messages += self._removed(sizes, broken)
        for name in sorted(sizes):
            if len(messages) >= count:
                break
            if sizes[name] == self._files.get(name, _Read()).size:
                continue
            if not ends and self._waiting_at.get(name) == sizes[name]:
                self._unfinished = name
                continue
            try:
                messages += self._lines(name, sizes[name], count - len(messages), ends)
                self._unreadable.pop(name, None)
            except OSError as error:
                broken[name] = error.strerror or str(error)
        return messages + self._cannot_be_read(broken)

    def _cannot_be_read(self, broken: dict[str, str]) -> list[Message]:
        """Report each file that cannot be read, once. It is read if one day it can be."""
        news = [name for name, reason in broken.items() if name not in self._unreadable]
        self._unreadable |= broken
        return [
            Message(f"{name}:0", str(self._directory / name), 0, b"", f"the file cannot be read: {broken[name]}")
            for name in news
        ]

    def _removed(self, sizes: dict[str, int], broken: dict[str, str]) -> list[Message]:
        """Forget files that are gone; what had not been read of one is reported."""
        messages: list[Message] = []
        known = {**self._files, **self._sizes_before}
        for name in [name for name in known if name not in sizes and name not in broken]:
            read = self._files.pop(name, _Read())
            unread = self._sizes_before.get(name, 0) > read.size
            place, path = f"{name}:{read.lines + 1}", str(self._directory / name)
            mark = [name, None, None]
            messages.append(
                Message(place, path, read.lines + 1, b"", _REMOVED if unread else None, mark, blank=not unread)
            )
            self._waiting_at.pop(name, None)
            self._unreadable.pop(name, None)
        self._sizes_before = sizes
        return messages

    def _sizes(self) -> dict[str, int]:
        """Measure every file that holds records, in bytes."""
        return self._measure()[0]

    def _measure(self) -> tuple[dict[str, int], dict[str, str]]:
        """Measure every file that holds records, in bytes; and name those that are there and cannot be measured."""
        sizes: dict[str, int] = {}
        broken: dict[str, str] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if not entry.name.endswith(SUFFIX) or entry.name[0] == "." or entry.name == EVENTS:
                        continue
                    try:
                        if entry.is_file():
                            sizes[entry.name] = entry.stat().st_size
                    except FileNotFoundError:
                        continue  # removed since, or a link to nothing
                    except OSError as error:  # a link to itself, a disk that fails
                        broken[entry.name] = error.strerror or str(error)
        except OSError as error:
            raise TransportError(f"{self.name} cannot be read: {error}") from error
        return sizes, broken

    def _lines(self, name: str, size: int, count: int, ends: bool) -> list[Message]:
        path, read = self._directory / name, self._files.get(name, _Read())
        messages: list[Message] = []
        with _open_file(path) as file:
            if not _continues(file, size, read):
                self._files[name] = _Read(read.lines, size)
                mark = [name, read.lines, size]
                return [Message(f"{name}:{read.lines}", str(path), read.lines, b"", _REPLACED, mark)]
            while len(messages) < count:
                line, length, whole = _next_line(file)
                if not length:
                    break
                if not whole and not ends:
                    self._unfinished = name
                    self._waiting_at[name] = size
                    break
                read = _Read(read.lines + 1, read.size + length)
                if read.lines == 1:
                    line = line.removeprefix(_MARK)
                mark = [name, read.lines, read.size]
                problem = _TOO_LONG if length > _LONGEST_LINE else None
                if line.strip() or problem:
                    messages.append(Message(f"{name}:{read.lines}", str(path), read.lines, line, problem, mark))
        if read != self._files.get(name, _Read()) and (not messages or messages[-1].mark[2] != read.size):
            # Blank lines at the end have no message, and are read as well.
            messages.append(Message(name, str(path), read.lines, b"", None, [name, read.lines, read.size], blank=True))
        self._files[name] = read
        return messages

    def state(self) -> dict[str, Any]:
        return {"files": {name: [read.lines, read.size] for name, read in self._files.items()}}

    def advance(self, place: dict[str, Any], mark: Any) -> None:
        name, lines, size = mark
        if lines is None:
            place["files"].pop(name, None)
        else:
            place["files"][name] = [lines, size]

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
        if self._unreadable:
            name, reason = next(iter(self._unreadable.items()))
            return f"{printable(name)} cannot be read: {printable(reason)}"
        if self._unfinished:
            return f"the last line of {printable(self._unfinished)} has no end: it counts as still being written"
        return f"files are read whose names end in {SUFFIX}"

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None: ...


def _open_file(path: Path) -> BinaryIO:
    """Open a file, and nothing else that may have taken its name: a pipe would be waited for without end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no file any more")
    return file


def _next_line(file: BinaryIO) -> tuple[bytes, int, bool]:
    """Read a line: its content, its length, and whether it has an end. Of one that is too long only the length."""
    line = file.readline(_LONGEST_LINE + 1)
    if line.endswith(b"\n") or len(line) <= _LONGEST_LINE:
        return line, len(line), line.endswith(b"\n")
    length, piece = len(line), line
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(2**20)
        length += len(piece)
    return b"", length, piece.endswith(b"\n")


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
