"""Wait until a server's workers have checked the weights that they were shown in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from truestep.sampler.server.errors import UnreachableError
from truestep.text import printable
from truestep.transfer.receiver import CHECKED, FAILED, UNDER_WAY

_SHORTEST, _LONGEST = 0.005, 0.1  # seconds between two looks
_LIFE_SECONDS = 5.0  # between two questions whether the server lives


async def wait_until_checked(marks: Path, timeout: float, lives: Callable[[], Awaitable[bool]]) -> str | None:
    """Wait for the marks of all workers, each of which made one when it was asked. Give the problem of one."""
    loop = asyncio.get_running_loop()
    start = asked = loop.time()
    delay = _SHORTEST
    while True:
        found = [mark.suffix for mark in marks.iterdir()]
        if FAILED in found:
            failed = next(mark for mark in marks.iterdir() if mark.suffix == FAILED)
            return printable(failed.read_text(encoding="utf-8"))
        if not found:
            return "it says that it checks them, and no worker of it does"
        if UNDER_WAY not in found:
            return None if set(found) == {CHECKED} else f"a worker's mark is {printable(min(found), 60)}"
        if loop.time() - start > timeout:
            raise UnreachableError(f"it has not checked the weights in memory within {timeout:g} s")
        if loop.time() - asked > _LIFE_SECONDS:
            asked = loop.time()
            if not await lives():
                raise UnreachableError("it was lost while it checked the weights in memory")
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LONGEST)
