"""Searches for the few members that contribute most of a sum.

Contributions add up: if one half of the members is measured, the other half contributes the rest. Of all intervals that
contribute enough, the shortest is divided next. One among n members is found with log2(n) measurements, which measure n
members in all; k members take up to k times as many.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_MEASURED = 40


@dataclass(frozen=True)
class Part:
    """Some members, and their contribution to the sum."""

    part: float
    members: Sequence[int]


@dataclass(frozen=True)
class Searched:
    found: list[Part]
    """The single members with a part of at least `least`."""
    others: list[Part]
    """The intervals with a part below `least`, which were not divided further, the largest part first."""
    left: list[Part]
    """The intervals with a part of at least `least` that were not divided before the measurements ended."""
    measured: int
    members: int
    """The number of members in all measurements."""


def search(
    members: Sequence[int],
    whole: float,
    measure: Callable[[Sequence[int]], float],
    least: float,
    *,
    most: int = MOST_MEASURED,
) -> Searched:
    """Find the members that contribute at least `least` to the sum `whole`, with at most `most` measurements."""
    found: list[Part] = []
    others: list[Part] = []
    order = itertools.count()
    # A heap of intervals: the shortest first; of equal lengths, the one with the largest part.
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
    """Find the members whose own value is at least `least`. `measure` returns the largest value of some members.
    Return no member if `most` measurements are too few to find all."""
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
