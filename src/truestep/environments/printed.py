"""The log of the last output that rewards and environments print, a file in the run's directory.

Imports no torch, because the processes of episodes import this module.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from truestep.text import printable

_MOST_BYTES = 2**20
_LONGEST_LINE = 500


class PrintedLog:
    """A log file of rewards' output, without control characters. When it is full, the oldest lines are removed."""

    def __init__(self, path: Path, say: Callable[[str], None] | None = None, owned: Callable[[], bool] = lambda: True):
        """`say` is called with a note about the file when a reward first prints. `owned`: False if another process
        writes the run."""
        self._path, self._say, self._owned = path, say, owned
        self._lock = threading.Lock()

    def add(self, worker: str, text: str) -> None:
        """Append a worker's output. Errors of the file are ignored, so that they do not end the run."""
        lines = "".join(f"{worker}: {printable(line, _LONGEST_LINE)}\n" for line in text.splitlines() if line.strip())
        if not lines or not self._owned():
            return
        with self._lock, contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size + len(lines) > _MOST_BYTES:
                kept = self._path.read_bytes()[-_MOST_BYTES // 2 :].partition(b"\n")[2]
                self._path.write_bytes(kept)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)
        say, self._say = self._say, None
        if say is not None:
            say(f"the reward prints; what it printed last is in {self._path}")


class _NamedLines:
    """A text stream that writes whole lines to another stream, each with a name before it."""

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name, self._rest = stream, name, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], ""
        if lines:
            self._stream.write("".join(f"{self._name}{line}\n" for line in lines))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def name_lines(name: str) -> None:
    """Put a name before each line that this process prints from now on."""
    for stream in ("stdout", "stderr"):
        setattr(sys, stream, _NamedLines(getattr(sys, stream), name))
