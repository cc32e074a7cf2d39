"""The search for the few of many that make most of a sum.

Parts of a sum add up, so one half is measured, and the other half's part is what is left. The half with the larger part
is divided further. One among n is found with log2(n) measurements, of n members in all; k of them with k times as many.
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
    order = itertools.count()
    waiting = [(-whole, next(order), Part(whole, members))]
    measured = count = 0
    while waiting and -waiting[0][0] >= least:
        one = waiting[0][2]
        if len(one.members) == 1:
            found.append(one)
            heapq.heappop(waiting)
            continue
        if measured == most:
            break
        heapq.heappop(waiting)
        half = len(one.members) // 2
        first, second = one.members[:half], one.members[half:]
        part = measure(first)
        measured, count = measured + 1, count + len(first)
        for each in (Part(part, first), Part(one.part - part, second)):
            heapq.heappush(waiting, (-each.part, next(order), each))
    return Searched(found, [one for _, _, one in sorted(waiting)], measured, count)
