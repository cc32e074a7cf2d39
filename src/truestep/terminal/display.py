"""The lines at the bottom of a terminal that say what this process does, and the messages above them.

One thread draws, and while it is there every message goes through it: a terminal that stands still holds nobody up. A
terminal that cannot be written to any more is not written to any more; no run ends for it. Where the output is no
terminal, messages are plain lines, and what the run does is written only where there has been no line for long.
"""

import contextlib
import io
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.text import Text

from truestep import progress
from truestep.terminal.words import doing_in_words

_EVERY = 0.2  # seconds between two looks
_RATE_OVER = 4.0  # seconds over which a rate is measured
# A terminal shows a Ctrl-C as ^C behind the last line. If that wrapped, the line's first row would not be found again.
_SPARE = 5  # columns: two of these, and one since a terminal wraps a line that is as wide as it is
_PLAIN_WIDTH = 160  # columns of what a file is told
_PATIENCE = 2.0  # seconds that a terminal has at the end to take what is left

_QUIET = 10.0  # seconds without a line after which a file is told what the run does
_LONGEST_QUIET = 600.0

Message = str | Text
Lines = Callable[[int], list[Text]]  # from the columns there are


def _no_lines(width: int) -> list[Text]:
    return []


class _Silence:
    """Decides when a file that has had no line for long gets one: after ten seconds, then after twice as long each
    time. Where the run's own lines are further apart than that, it waits for twice their distance first."""

    def __init__(self, now: float):
        self._last, self._wait, self._next = now, _QUIET, now + _QUIET
        self._gaps: deque[float] = deque(maxlen=5)  # seconds between the run's last lines

    def said(self, now: float) -> None:
        """Note that the run itself wrote a line."""
        self._gaps.append(now - self._last)
        self._wait = max(_QUIET, min(_LONGEST_QUIET, 2 * max(self._gaps)))
        self._last, self._next = now, now + self._wait

    def due(self, now: float) -> bool:
        """Ask whether a line is due. The one who asks then writes it."""
        if now < self._next:
            return False
        self._wait = min(_LONGEST_QUIET, 2 * self._wait)
        self._next = now + self._wait
        return True


class Display:
    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self.console = console
        self._clock = clock
        self._silence = _Silence(clock())
        self.lines: Lines = _no_lines  # of the run, around what the process does: the first above it, the rest below
        self.asked_to_stop: Callable[[], int | None] = lambda: None  # by which signal
        self._live = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._messages: deque[Message] = deque()
        self._screen = _Screen(console)
        self._tokens: deque[tuple[float, float]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered = self._broken = False
        self._streams = contextlib.ExitStack()

    @property
    def live(self) -> bool:
        """True where there are lines that change: a plain line a step would be one too many."""
        return self._live and self._thread is not None

    def say(self, message: Message) -> None:
        """Print a message above the lines that change."""
        if self._broken:
            return
        if self.live:
            self._messages.append(message)
            return
        self._silence.said(self._clock())
        self._print(message)

    def _print(self, message: Message) -> None:
        try:
            if isinstance(message, str):
                self.console.print(message, highlight=False, markup=False, soft_wrap=True)
            else:
                self.console.print(message, soft_wrap=True)
        except (OSError, ValueError):  # the terminal or the pipe is gone
            self._broken = True

    def __enter__(self) -> Self:
        if self._live:
            self._streams.enter_context(self._screen.shared_with_prints())
        self._thread = threading.Thread(target=self._work, daemon=True, name="display")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        thread, self._thread = self._thread, None
        self._closing.set()
        if thread is not None:
            thread.join(_PATIENCE)
            if thread.is_alive():  # the terminal takes nothing: let it be
                self._broken = True
        self._streams.close()
        if self._live and not self._broken:
            self._guarded(lambda: self._screen.leave(self._drain(), self.lines(self._width)))

    @property
    def _width(self) -> int:
        return max(20, self.console.size.width - _SPARE)

    def _work(self) -> None:
        while not self._broken:
            last = self._closing.wait(_EVERY)
            self._guarded(self._look)
            if last:
                return

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # whatever a terminal or a library that draws comes up with: no run ends for it
            self._broken = True

    def _look(self) -> None:
        number = self.asked_to_stop()
        if number is not None and not self._answered:
            self._answered = True
            self._answer(number)
        if self._live:
            self._screen.draw(self._drain(), self._frame(self._width))
        elif self._silence.due(self._clock()) and (doing := self._doing(_PLAIN_WIDTH)):
            self._print(doing)

    def _answer(self, number: int) -> None:
        how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        again = how if number == signal.SIGINT else "signal"
        text = f"stopping ({how}): the work in hand ends first, then the run is saved. A second {again} ends it at once"
        if self._live:
            self._messages.append(Text(text, style="bold yellow"))
        else:
            self.console.print(text, highlight=False, soft_wrap=True)

    def _drain(self) -> list[Message]:
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def _frame(self, width: int) -> list[Text]:
        lines = self.lines(width)
        return [*lines[:1], Text(self._doing(width), style="cyan", no_wrap=True), *lines[1:]]

    def _doing(self, width: int) -> str:
        """Say what this process does, how far it is, and for how long it has been at it."""
        phase, since = progress.current_phase()
        works = progress.works()
        seconds = self._clock() - max([since, *(work.since for work in works[-1:])])
        waits = [what for what in progress.waits() if not what.startswith("the disk")]
        return doing_in_words(phase, works, waits, seconds, self._token_rate(), width)

    def _token_rate(self) -> float:
        """Measure the tokens a second that this process made lately."""
        now, made = self._clock(), progress.amounts().get("tokens", 0.0)
        self._tokens.append((now, made))
        while len(self._tokens) > 2 and now - self._tokens[1][0] > _RATE_OVER:
            self._tokens.popleft()
        start, before = self._tokens[0]
        return (made - before) / (now - start) if now > start else 0.0


class _Screen:
    """The last lines of a terminal, drawn over again and again. Whatever else is printed comes above them."""

    def __init__(self, console: Console):
        self._console, self._file = console, console.file  # before prints are led past it
        self._lock = threading.RLock()
        self._drawn: list[int] = []  # the columns that each line takes which is there now
        self._last = ""

    def draw(self, messages: list[Message], lines: list[Text]) -> None:
        """Show messages, and the lines below them."""
        with self._lock:
            above = "".join(self._ansi(message) + "\n" for message in messages)
            frame = "\x1b[K\n".join(self._ansi(line) for line in lines)
            if not above and frame == self._last and self._drawn:
                return
            self._write(self._back() + ("\x1b[J" if above else "") + above + frame + "\x1b[K\x1b[J")
            self._last, self._drawn = frame, [line.cell_len for line in lines]

    def leave(self, messages: list[Message], lines: list[Text]) -> None:
        """Remove the lines; show what is to stay."""
        with self._lock:
            rest = "".join(self._ansi(message) + "\n" for message in (*messages, *lines))
            self._write((self._back() + "\x1b[J" if self._drawn else "") + rest)
            self._drawn = []

    def print_above(self, stream: TextIO, text: str) -> None:
        """Print what somebody else has to say; the lines are drawn anew below it."""
        with self._lock:
            if self._drawn:
                self._write(self._back() + "\x1b[J")
                self._drawn = []
            stream.write(text)
            stream.flush()

    @contextlib.contextmanager
    def shared_with_prints(self) -> Iterator[None]:
        """Let `print` of any thread come above the lines, where it goes to this terminal."""
        before = sys.stdout, sys.stderr
        streams = [_Above(self, stream) if _is_terminal(stream) else stream for stream in before]
        sys.stdout, sys.stderr = streams
        try:
            yield
        finally:
            for stream in streams:
                if isinstance(stream, _Above):
                    stream.end_line()
            sys.stdout, sys.stderr = before

    def _back(self) -> str:
        """Go to the start of the first line, also where the terminal is narrower now and wrapped some."""
        width = max(1, self._console.size.width)
        rows = sum(max(1, -(-columns // width)) for columns in self._drawn)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")

    def _ansi(self, message: Message) -> str:
        if isinstance(message, str):
            return message
        colours: dict[str, Any] = {"color_system": self._console.color_system, "no_color": self._console.no_color}
        written = io.StringIO()
        writer = Console(file=written, force_terminal=True, legacy_windows=False, **colours)
        writer.print(message, end="", soft_wrap=True)
        return written.getvalue()

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class _Above(io.TextIOBase):
    """A stream whose whole lines are printed above a screen's lines."""

    def __init__(self, screen: _Screen, stream: TextIO):
        self._screen, self.stream = screen, stream
        self._started = ""  # a line without its end

    def write(self, text: str) -> int:
        whole, end, started = (self._started + text).rpartition("\n")
        self._started = started.rpartition("\r")[2]  # of what is written over itself, the last
        if end:
            self._screen.print_above(self.stream, whole + end)
        return len(text)

    def end_line(self) -> None:
        if self._started:
            self._screen.print_above(self.stream, self._started + "\n")
            self._started = ""

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding
