"""An event loop whose clock jumps to the next timer when nothing is ready: hours pass in no time, and always alike."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Waits for nobody: what would be waited for is passed over on the loop's clock."""

    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._of = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing is ever going to happen")
        self._of.now += max(timeout, 0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualThread:
    """In the place of `LoopThread`: its loop runs while somebody waits for a result, and time passes at no other."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()

    def submit(self, work: Coroutine[Any, Any, T]) -> Any:
        return _Pending(self.loop, self.loop.create_task(work))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def advance(self, seconds: float) -> None:
        """What the loop does while the trainer is busy for so long."""
        self.run(asyncio.sleep(seconds))

    def close(self) -> None:
        assert not asyncio.all_tasks(self.loop), "something goes on behind the end"
        self.loop.close()


class _Pending:
    """In the place of a `concurrent.futures.Future`."""

    def __init__(self, loop: VirtualLoop, task: asyncio.Task[Any]):
        self._loop, self._task = loop, task

    def _wait(self, timeout: float | None) -> None:
        async def wait() -> None:
            await asyncio.wait({self._task}, timeout=timeout)

        self._loop.run_until_complete(wait())
        if not self._task.done():
            raise TimeoutError

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        return self._task.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return self._task.exception()

    def done(self) -> bool:
        return self._task.done()

    def cancel(self) -> bool:
        return self._task.cancel()
