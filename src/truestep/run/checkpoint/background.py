"""A thread for one piece of work."""

import threading
from collections.abc import Callable
from typing import Any


class Task:
    """Runs work in a thread, and keeps its result or its error."""

    def __init__(self, work: Callable[[], Any]):
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except BaseException as error:  # also SystemExit: the work did not finish
            self.error = error

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()
