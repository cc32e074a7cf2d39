"""A transport whose messages are the lines of files in a watched directory.

A sender renames a complete file to `NAME.jsonl`, or appends lines to it. A line without a line break counts as still
being written: it is read once it has one, or once a file `END` marks the end of the data. A file that replaces another
under the same name is read from its beginning (`watched.py` tells them apart).
"""

import os
import threading
import time
from collections import deque
from hashlib import blake2b
from pathlib import Path
from typing import Any

from truestep.files.bounded import too_long
from truestep.files.whole import append_json_line
from truestep.rollouts.source import SourceError, other_source
from truestep.rollouts.stream.transport import Message, TransportError
from truestep.rollouts.stream.watched import Read, Seen, WatchedFile, open_file
from truestep.text import printable

EVENTS, END, SUFFIX = "events.jsonl", "END", ".jsonl"
_FIRST_LOOK, _LONGEST_LOOK = 0.01, 0.5  # seconds between scans of the directory
_REPLACED = "the file was replaced before all of it was read"
_REMOVED = "the file was removed before all of it was read"
_MARK = b"\xef\xbb\xbf"  # byte order mark, which some editors write


class DirectoryTransport:
    def __init__(self, directory: Path):
        if not directory.is_dir():
            raise SourceError(f"data.source.directory: {directory} is not a directory: make it before the run starts")
        self._directory = directory
        self.name = f"the directory {printable(directory)}"
        self.ended = False
        self._files: dict[str, WatchedFile] = {}
        self._acknowledged: set[tuple[Any, ...]] = set()  # marks of acknowledged files, as tuples
        self._outbox: deque[dict[str, Any]] = deque()
        self._sizes_before: dict[str, int] = {}  # sizes of the files at the previous scan
        self._unreadable: dict[str, str] = {}  # error by file name; reported once, and the file is retried
        self._interrupted = threading.Event()
        self._lock = threading.Lock()  # guards `_files`: one thread reads them, another acknowledges them

    def fetch(self, count: int, seconds: float) -> list[Message]:
        deadline, pause = time.monotonic() + seconds, _FIRST_LOOK
        while True:
            ends = (self._directory / END).exists()  # checked before the scan, so that the scan sees all files
            with self._lock:
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
        found, broken = self._measure()
        messages = self._removed(found, broken)
        for name in sorted(found):
            if len(messages) >= count:
                break
            file = self._files.setdefault(name, WatchedFile(Read()))
            if not file.has_news(found[name], ends):
                continue
            try:
                messages += self._lines(name, file, found[name], count - len(messages), ends)
                self._unreadable.pop(name, None)
            except OSError as error:
                broken[name] = error.strerror or str(error)
        self._sizes_before = {name: seen.size for name, seen in found.items()}
        return messages + self._cannot_be_read(broken)

    def _cannot_be_read(self, broken: dict[str, str]) -> list[Message]:
        """Return a message for each newly unreadable file. The file is retried at later scans."""
        news = [name for name, reason in broken.items() if name not in self._unreadable]
        self._unreadable |= broken
        return [
            Message(f"{name}:0", str(self._directory / name), 0, b"", f"the file cannot be read: {broken[name]}")
            for name in news
        ]

    def _removed(self, found: dict[str, Seen], broken: dict[str, str]) -> list[Message]:
        """Forget removed files, and return a message for each of them; one with unread bytes is a problem."""
        messages: list[Message] = []
        known = {**self._files, **self._sizes_before}
        for name in [name for name in known if name not in found and name not in broken]:
            file = self._files.pop(name, None)
            read = file.read if file is not None else Read()
            unread = self._sizes_before.get(name, 0) > read.size
            place, path = f"{name}:{read.lines + 1}", str(self._directory / name)
            messages.append(
                Message(place, path, read.lines + 1, b"", _REMOVED if unread else None, [name], blank=not unread)
            )
            self._unreadable.pop(name, None)
        return messages

    def _measure(self) -> tuple[dict[str, Seen], dict[str, str]]:
        """Scan the directory. Returns the state of each record file, and an error for each that cannot be examined."""
        found: dict[str, Seen] = {}
        broken: dict[str, str] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    if not entry.name.endswith(SUFFIX) or entry.name[0] == "." or entry.name == EVENTS:
                        continue
                    try:
                        if entry.is_file():
                            told = entry.stat()
                            found[entry.name] = Seen(told.st_ino, told.st_size, told.st_mtime_ns, told.st_ctime_ns)
                    except FileNotFoundError:
                        continue  # removed since the scan, or a dangling link
                    except OSError as error:  # a link to itself, a failing disk
                        broken[entry.name] = error.strerror or str(error)
        except OSError as error:
            raise TransportError(f"{self.name} cannot be read: {error}") from error
        return found, broken

    def _lines(self, name: str, file: WatchedFile, seen: Seen, count: int, ends: bool) -> list[Message]:
        path, messages, before = self._directory / name, list[Message](), file.read
        unread = file.seen is not None and file.seen.size > before.size
        with open_file(path) as opened:
            same = file.goes_on(opened, seen, ends, self._interrupted.is_set)
            if same is None:
                return []
            if unread and not same:
                number = before.lines + 1
                messages.append(Message(f"{name}:{number}", str(path), number, b"", _REPLACED, _mark(name, file.read)))
            for line, read in file.lines(opened, count, ends):
                where, mark = f"{name}:{read.lines}", _mark(name, read)
                if line is None:
                    messages.append(
                        Message(where, str(path), read.lines, b"", f"the line is not read: {too_long()}", mark)
                    )
                elif (content := line.removeprefix(_MARK) if read.lines == 1 else line).strip():
                    key = f"{where}:{_digest(content)}"
                    messages.append(Message(where, str(path), read.lines, content, None, mark, content=key))
        last = _mark(name, file.read)
        if file.read != before and (not messages or messages[-1].mark != last):
            # Trailing blank lines have no message: move the place past them.
            messages.append(Message(name, str(path), file.read.lines, b"", None, last, blank=True))
        return messages

    def state(self) -> dict[str, Any]:
        place: dict[str, Any] = {"files": {}}
        for name, file in self._files.items():
            self.advance(place, _mark(name, file.read))
        return place

    def advance(self, place: dict[str, Any], mark: Any) -> None:
        name, *read = mark
        if read:
            place["files"][name] = read
        else:
            place["files"].pop(name, None)

    def restore(self, state: dict[str, Any]) -> None:
        if "files" not in state:
            raise other_source("data.source", "a stream", "a watched directory")
        self._files = {name: WatchedFile(Read(*read)) for name, read in state["files"].items()}

    def acknowledge(self, state: dict[str, Any]) -> None:
        """Announce which files are fully read and checkpointed, so that senders may remove them."""
        with self._lock:
            try:
                found = self._measure()[0]
            except TransportError:
                return  # the next checkpoint acknowledges the files again
            done = {
                (name, *read)
                for name, read in state["files"].items()
                if name in found and self._is_done(name, read, found[name])
            }
        new = sorted(done - self._acknowledged)
        self._acknowledged = done
        if new:
            self.announce({"event": "acknowledged", "files": [name for name, *_ in new]})

    def _is_done(self, name: str, read: list[Any], seen: Seen) -> bool:
        """Return whether a file is fully read and unchanged since it was compared.

        A changed file is not done, because another file may have taken its name.
        """
        file = self._files.get(name)
        if file is None or seen.size != Read(*read).size:
            return False
        try:
            if file.seen is None:  # not compared yet since a restart
                with open_file(self._directory / name) as opened:
                    file.goes_on(opened, seen, False, self._interrupted.is_set)
        except OSError:
            return False
        return file.seen == seen and (len(read) < 3 or _mark(name, file.read) == [name, *read])

    def announce(self, event: dict[str, Any]) -> None:
        self._outbox.append(event)
        try:
            _end_last_line(self._directory / EVENTS)
            while self._outbox:
                append_json_line(self._directory / EVENTS, self._outbox[0])
                self._outbox.popleft()
        except OSError:
            return  # sent with the next event; an unwritable events file does not stop the run

    def hint(self) -> str | None:
        if self._unreadable:
            name, reason = next(iter(self._unreadable.items()))
            return f"{printable(name)} cannot be read: {printable(reason)}"
        unfinished = next((name for name, file in sorted(self._files.items()) if file.unfinished), None)
        if unfinished:
            return f"the last line of {printable(unfinished)} has no end: it counts as still being written"
        return f"files are read whose names end in {SUFFIX}"

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None: ...


def _mark(name: str, read: Read) -> list[Any]:
    """Return a file's position for a checkpoint; only the name if nothing was read."""
    return [name, read.lines, read.size, read.digest] if read.size else [name]


def _digest(line: bytes) -> str:
    return blake2b(line, digest_size=16).hexdigest()


def _end_last_line(path: Path) -> None:
    """Add a missing line break after an incomplete last line, which a power cut may have left."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
