"""The parts of the work of `Generator.map`: each asks for one completion after another.

An item's work is one part. Where it does several things at once, each of them is a part of it. The engine has to know
them where the run is deterministic: `engine/waves`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False)
class Part:
    place: tuple[int, ...]  # the item's number, and then those of the parts within parts
    open: set["Part"]  # all parts that are not done
    ended: Callable[[], None]  # called when a part is done
    num_begun: int = 0  # parts of this part
    num_open: int = 0  # of these, not done

    def part(self) -> "Part":
        self.num_begun += 1
        return Part((*self.place, self.num_begun), self.open, self.ended)


_current: ContextVar[Part | None] = ContextVar("part of the work", default=None)


def current_part() -> Part | None:
    """Return the part whose task this is."""
    return _current.get()


@contextmanager
def working_on(part: Part) -> Iterator[None]:
    """Do a part of the work: requests of this task, and of tasks that it begins, are the part's."""
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
    """Do one of several things that are done at once."""
    whole = _current.get()
    if whole is None:  # nobody has to know
        yield
        return
    part = whole.part()
    whole.num_open += 1
    try:
        with working_on(part):
            yield
    finally:
        whole.num_open -= 1
