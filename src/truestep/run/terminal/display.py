"""The changing lines at the bottom of a terminal that show what this process does, and the messages above them.

One thread draws, with rich's Live, and prints all messages, so a terminal that blocks does not block the run. After an
error of the terminal nothing more is written to it, and the run goes on. If the output is not a terminal, messages are
plain lines. A line says what the run does at the start, once for each kind of work that takes seconds, and after a long
silence.
"""

import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from truestep.process import progress
from truestep.run.terminal.words import doing_in_words, duration

_EVERY = 0.2  # seconds between two draws
_RATE_OVER = 4.0  # seconds over which the token rate is measured
# Columns kept free: a terminal echoes each Ctrl-C as ^C after the last line, and two of these must not wrap the line.
_SPARE = 5
_PLAIN_WIDTH = 160  # columns of a line in a file
_PATIENCE = 2.0  # seconds to wait at the end for a terminal that blocks

_FIRST = 0.5  # seconds after which a file gets its first line: a command that ends at once does not need one
_NEW = 2.0  # seconds after which a file gets a line about a kind of work that has no line yet
_QUIET = 10.0  # seconds of silence after which a file gets a line that says what the run does
_LONGEST_QUIET = 600.0

Message = str | Text
Lines = Callable[[int], list[Text]]  # width in columns -> lines


def print_plain(console: Console, message: Message) -> None:
    """Print a message without markup. A terminal gets it wrapped between words, and a file in one line. A word that is
    longer than the line stays whole: it may be a path to copy."""
    if is_terminal(console):
        message = _wrapped(Text(message) if isinstance(message, str) else message, console.width)
    console.print(message, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _wrapped(message: Text, width: int) -> Text:
    """Break a message between words. Rich would also break a word that is longer than the line."""
    pieces: list[Text] = []
    for line in message.split("\n", allow_blank=True):
        begin, breaks = 0, list[int]()
        for word in re.finditer(r"\S+", line.plain):
            has_words = line.plain[begin : word.start()].strip()
            if has_words and cell_len(line.plain[begin : word.end()]) > width:
                begin = word.start()
                breaks.append(begin)
        pieces += line.divide(breaks)
    for piece in pieces:
        piece.rstrip()
    return Text("\n").join(pieces)


def is_terminal(console: Console) -> bool:
    """Tell whether the output is a terminal. Rich also says so of a file if FORCE_COLOR is set."""
    return console.is_terminal and console.file.isatty()


def _no_lines(width: int) -> list[Text]:
    return []


class _Silence:
    """Decides when a silent file gets a line: after ten seconds, then each time after twice as long. If the run's own
    lines are further apart, the first wait is twice the longest gap between the last five of them."""

    def __init__(self, now: float):
        self._last, self._wait, self._next = now, _QUIET, now + _QUIET
        self._gaps: deque[float] = deque(maxlen=5)  # seconds between the run's last lines

    def said(self, now: float) -> None:
        """Note that the run wrote a line of its own."""
        self._gaps.append(now - self._last)
        self._wait = max(_QUIET, min(_LONGEST_QUIET, 2 * max(self._gaps)))
        self._last, self._next = now, now + self._wait

    def due(self, now: float) -> bool:
        """Tell whether a line is due. If it is, the caller writes it, and the next wait is twice as long."""
        if now < self._next:
            return False
        self._wait = min(_LONGEST_QUIET, 2 * self._wait)
        self._next = now + self._wait
        return True


class Display:
    """Shows what a command does: changing lines on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        self.console = console
        self._clock = clock
        self._silence = _Silence(clock())
        # Kinds of work that already have a line in the file. The current work counts if it began long before this
        # display: an earlier display has printed its line.
        self._said = {self._kind()} if self._seconds() > _NEW else set()
        self.lines: Lines = _no_lines  # the run's lines: the first is drawn above the line of the phase, the rest below
        self.asked_to_stop: Callable[[], int | None] = lambda: None  # returns the number of the stop signal
        self.computing_takes: Callable[[], float | None] = lambda: None  # seconds from documents to updated weights
        self._live = console.is_interactive and is_terminal(console) and not console.quiet
        self._messages: deque[Message] = deque()
        # Live also prints what `print` writes, in any thread, above the lines.
        self._screen = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._tokens: deque[tuple[float, float]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered = self._broken = False

    @property
    def live(self) -> bool:
        """True while changing lines show each step; then no plain line per step is printed."""
        return self._live and self._thread is not None

    def say(self, message: Message) -> None:
        """Print a message, on a terminal above the changing lines."""
        if self._broken:
            return
        if self.live:
            self._messages.append(message)
            return
        self._silence.said(self._clock())
        self._print(message)

    def _print(self, message: Message) -> None:
        try:
            print_plain(self.console, message)
        except (OSError, ValueError):  # the terminal or the pipe is gone
            self._broken = True

    def __enter__(self) -> Self:
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
        blocked = thread is not None and thread.is_alive()
        broken = self._broken
        self._broken = broken or blocked
        if self._live and not blocked:  # a write to a blocked terminal would block this thread too
            if not broken:
                self._guarded(lambda: self._draw(self.lines(self._width)))
            self._guarded(self._screen.stop)

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
        except Exception:  # an error of the display must not end the run
            self._broken = True

    def _look(self) -> None:
        number = self.asked_to_stop()
        if number is not None and not self._answered:
            self._answered = True
            self._answer(number)
        if self._live:
            self._draw(self._frame(self._width))
        elif (
            not self._closing.is_set()
            and (self._is_new() or self._silence.due(self._clock()))
            and (doing := self._doing(_PLAIN_WIDTH))
        ):
            self._print(doing)

    def _is_new(self) -> bool:
        """Tell whether the current work gets a line: the first work after `_FIRST` seconds, a new kind after `_NEW`."""
        kind = self._kind()
        if not kind or kind in self._said or self._seconds() < (_NEW if self._said else _FIRST):
            return False
        self._said.add(kind)
        return True

    @staticmethod
    def _kind() -> str:
        """Return the names of the current phase and work, without numbers."""
        names = [progress.current_phase()[0], *(work.name for work in progress.works()[-1:])]
        return re.sub(r"\d+", "", ": ".join(filter(None, names)))

    def _answer(self, number: int) -> None:
        how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        again = how if number == signal.SIGINT else "signal"
        text = (
            f"stopping ({how}): the work in hand ends first{self._ends_in()}, then the run is saved. A second {again} "
            "ends the run at once, and steps that are not saved are computed again"
        )
        message = Text(text, style="bold yellow")
        if self._live:
            self._messages.append(message)
        else:
            self._print(message)

    def _ends_in(self) -> str:
        """Return the time left of the step that is being computed, estimated from earlier steps; "" if unknown."""
        takes = self.computing_takes()
        if takes is None or not progress.current_phase()[0].startswith("computing step"):
            return ""  # a stop interrupts sampling and evaluations at once
        left = takes - (self._clock() - progress.current_phase()[1])
        return f" (about {duration(left + 0.5)}, judging by the last steps)" if left > 0 else ""

    def _draw(self, lines: list[Text]) -> None:
        """Print the messages, and draw the lines below them."""
        if not self._screen.is_started:
            self._screen.start()
            self.console.show_cursor(True)  # a killed run must not leave the terminal without a cursor
        self._screen.update(Group(*lines), refresh=not self._messages)
        while self._messages:
            print_plain(self.console, self._messages.popleft())

    def _frame(self, width: int) -> list[Text]:
        lines = self.lines(width)
        return [*lines[:1], Text(self._doing(width), style="cyan", no_wrap=True), *lines[1:]]

    def _doing(self, width: int) -> str:
        """Return the line with the current work, its progress and its time so far."""
        phase, works = progress.current_phase()[0], progress.works()
        waits = [what for what in progress.waits() if not what.startswith("the disk")]
        return doing_in_words(phase, works, waits, self._seconds(), self._token_rate(), width)

    def _seconds(self) -> float:
        """Return the seconds that the current work has taken so far."""
        return self._clock() - max([progress.current_phase()[1], *(work.since for work in progress.works()[-1:])])

    def _token_rate(self) -> float:
        """Compute the tokens per second that this process sampled over the last `_RATE_OVER` seconds."""
        now, made = self._clock(), progress.amounts().get("tokens", 0.0)
        self._tokens.append((now, made))
        while len(self._tokens) > 2 and now - self._tokens[1][0] > _RATE_OVER:
            self._tokens.popleft()
        start, before = self._tokens[0]
        return (made - before) / (now - start) if now > start else 0.0
