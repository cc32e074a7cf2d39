"""A terminal for tests: what a pseudo-terminal was sent, as the lines that a person sees."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress

_TOKEN = re.compile(r"\x1b\[(?P<parameters>[?\d;]*)(?P<letter>[A-Za-z])|(?P<text>[^\x1b])", re.DOTALL)


class Screen:
    """Lines of `width` columns; as many as there are, so that nothing is ever scrolled away."""

    def __init__(self, width: int):
        self.width = width
        self._cells: list[dict[int, str]] = [{}]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for found in _TOKEN.finditer(text):
            if found["letter"]:
                self._command(found["letter"], found["parameters"])
            else:
                self._letter(found["text"])

    def _command(self, letter: str, parameters: str) -> None:
        if letter == "A":
            assert int(parameters or 1) <= self._row, "it went up beyond the first line"
            self._row -= int(parameters or 1)
        elif letter in "KJ":
            first = 0 if parameters == "2" else self._column
            for column in [column for column in self._cells[self._row] if column >= first]:
                del self._cells[self._row][column]
            if letter == "J":
                del self._cells[self._row + 1 :]
        else:  # colours, and whether there is a cursor
            assert letter in "mhl", f"the test's terminal does not know \\x1b[{parameters}{letter}"

    def _letter(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._row, self._column = self._row + 1, 0
        else:
            if self._column == self.width:
                self._row, self._column = self._row + 1, 0
            self._line()[self._column] = letter
            self._column += 1
        self._line()

    def _line(self) -> dict[int, str]:
        while len(self._cells) <= self._row:
            self._cells.append({})
        return self._cells[self._row]

    @property
    def lines(self) -> list[str]:
        return [
            "".join(cells.get(column, " ") for column in range(max(cells, default=-1) + 1)) for cells in self._cells
        ]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class PseudoTerminal:
    """A pseudo-terminal: programs write to `name`, and a screen shows it."""

    def __init__(self, width: int = 80):
        self.master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        os.set_blocking(self.master, False)
        self.name = os.ttyname(self.slave)
        self.screen = Screen(width)
        self.seen: list[str] = []  # what the screen showed, each time that it changed
        self.sent = ""
        self._rest = b""

    def read(self) -> None:
        with suppress(BlockingIOError, OSError):
            while content := os.read(self.master, 65536):
                whole = self._rest + content
                text = whole.decode(errors="ignore")
                self._rest = whole[len(text.encode()) :]
                self.sent += text
                self.screen.feed(text)
                self.seen.append(self.screen.text)

    def wait_for(self, found: Callable[[str], bool], seconds: float = 200) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read()
            if any(found(text) for text in self.seen):
                return True
            time.sleep(0.02)
        return False

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def close(self) -> None:
        for handle in (self.master, self.slave):
            with suppress(OSError):
                os.close(handle)
