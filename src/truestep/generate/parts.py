"""The parts of the work of `Generator.map`. Each part requests one completion after another.

An item's work is one part. If it does several things at once, each of these is a part within it. In a deterministic
run, the engine has to know the parts (`engine/waves`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False)
class Part:
    place: tuple[int, ...]  # the item's number, followed by the numbers of nested parts
    open: set["Part"]  # all parts that are not done
    ended: Callable[[], None]  # called when a part is done
    num_begun: int = 0  # nested parts begun so far
    num_open: int = 0  # nested parts that are not done

    def part(self) -> "Part":
        self.num_begun += 1
        return Part((*self.place, self.num_begun), self.open, self.ended)


_current: ContextVar[Part | None] = ContextVar("part of the work", default=None)


def current_part() -> Part | None:
    """Return the part to which the current task belongs."""
    return _current.get()


@contextmanager
def working_on(part: Part) -> Iterator[None]:
    """Work on a part inside the block: requests of this task, and of tasks that it begins, belong to the part."""
    before = _current.set(part)
    part.open.add(part)
    try:
        yield
    finally:
        part.open.discard(part)
        _current.reset(before)
        part.ended()


@contextmanager
def part_of_work() -> Iterator[None]:
    """Do one of several things that are done at once. Inside the block, it is a nested part of the current part."""
    whole = _current.get()
    if whole is None:  # the caller is not part of the work of `map`
        yield
        return
    part = whole.part()
    whole.num_open += 1
    try:
        with working_on(part):
            yield
    finally:
        whole.num_open -= 1
