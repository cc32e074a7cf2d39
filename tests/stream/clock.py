"""A clock that goes on only when the code waits, so that a test of waiting takes no time and knows how long it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Clock:
    """Stands in for the module `time`. What is due happens during a wait, at its own time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[..., Any], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., Any], *arguments: Any) -> None:
        self._due.append((time, action, arguments))
        self._due.sort(key=lambda due: due[0])

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + max(seconds, 1e-9)  # a wait too short to tell would be repeated for ever
        while self._due and self._due[0][0] <= end:
            time, action, arguments = self._due.pop(0)
            self.now = max(self.now, time)
            action(*arguments)
        self.now = end
