"""The search for the few of many that make most of a sum.

Parts of a sum add up, so one half is measured, and the other half's part is what is left. Of all intervals with enough,
the shortest is divided further. One among n is found with log2(n) measurements, of n members in all; k of them with k
times as many.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_MEASURED = 40


@dataclass(frozen=True)
class Part:
    """Some members, and their part of the sum."""

    part: float
    members: Sequence[int]


@dataclass(frozen=True)
class Searched:
    found: list[Part]
    """The single members with a part of at least `least`."""
    others: list[Part]
    """All others, as far as they were divided, the largest part first."""
    left: list[Part]
    """Several members with a part of at least `least` that were not looked into, as the measurements ended."""
    measured: int
    members: int
    """How many members were measured in all."""


def search(
    members: Sequence[int],
    whole: float,
    measure: Callable[[Sequence[int]], float],
    least: float,
    *,
    most: int = MOST_MEASURED,
) -> Searched:
    """Find the members whose part of the sum `whole` is at least `least`, with at most `most` measurements."""
    found: list[Part] = []
    others: list[Part] = []
    order = itertools.count()
    # A heap: the shortest first, and of equally short ones that with the largest part of the sum.
    waiting: list[tuple[int, float, int, Part]] = []
    measured = count = 0

    def sort(one: Part) -> None:
        if one.part < least:
            others.append(one)
        elif len(one.members) == 1:
            found.append(one)
        else:
            heapq.heappush(waiting, (len(one.members), -one.part, next(order), one))

    if members:
        sort(Part(whole, members))
    while waiting and measured < most:
        one = heapq.heappop(waiting)[-1]
        half = len(one.members) // 2
        first, second = one.members[:half], one.members[half:]
        part = measure(first)
        measured, count = measured + 1, count + len(first)
        sort(Part(part, first))
        sort(Part(one.part - part, second))
    left = [one for *_, one in waiting]
    for parts in (found, others, left):
        parts.sort(key=lambda one: -one.part)
    return Searched(found, others, left, measured, count)


def search_extreme(
    members: Sequence[int], measure: Callable[[Sequence[int]], float], least: float, *, most: int
) -> list[Part]:
    """Find the members whose own value is at least `least`, if the value of several is the largest of theirs. None if
    they are so many that `most` measurements do not find them all."""
    found, waiting, measured = list[Part](), [members], 0
    while waiting:
        some = waiting.pop()
        if measured == most:
            return []
        value, measured = measure(some), measured + 1
        if value >= least and len(some) == 1:
            found.append(Part(value, some))
        elif value >= least:
            waiting += [some[: len(some) // 2], some[len(some) // 2 :]]
    return found
