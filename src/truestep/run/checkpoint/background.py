"""Work in a thread of its own."""

import threading
from collections.abc import Callable
from typing import Any


class Task:
    """Work in a thread, and what became of it."""

    def __init__(self, work: Callable[[], Any]):
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except BaseException as error:  # also what ends threads: it must not pass for work that is done
            self.error = error

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()
