"""Items of a plan: sequences that are computed together because they share a prefix.

A tree that is longer than a limit is divided, and each part computes what it begins with again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from truestep.rollouts.packing import first_fit_decreasing
from truestep.rollouts.prefixes import PATH_COST, Forest, find_segments

# A prefix ties sequences to one micro-batch only if sharing it saves so much of their tokens. What saves less, as the
# first words of a chat template do, is shared where sequences meet anyway.
_TIES = 0.05


@dataclass(frozen=True)
class Item:
    """Sequences of one micro-batch."""

    members: tuple[int, ...]
    tokens: int  # that are computed
    cost: float  # in tokens of a short document


@dataclass(frozen=True)
class _Part:
    """Some sequences below one segment."""

    members: tuple[int, ...]
    tokens: int  # without those of the segment and its ancestors
    cost: float


def find_ties(sequences: Sequence[np.ndarray], least: int) -> Forest:
    """Find the segments that tie sequences to one micro-batch. `least`: the tokens that a segment must save."""
    return find_segments(sequences, least, _TIES)


def make_items(forest: Forest, limit: int, even_length: float) -> list[Item]:
    """Divide sequences into items of at most `limit` tokens, which no sequence may exceed."""
    return _Divider(forest, limit, even_length).items()


class _Divider:
    def __init__(self, forest: Forest, limit: int, even_length: float):
        self._forest, self._limit, self._even_length = forest, limit, even_length
        self._items: list[Item] = []

    def items(self) -> list[Item]:
        """Go through the segments from the leaves on. What remains below each segment is carried to its parent; what
        does not fit a micro-batch with the segment's path becomes items."""
        segments = self._forest.segments
        waiting: list[list[_Part]] = [[] for _ in segments]  # the parts below each segment
        ending: list[list[int]] = [[] for _ in segments]
        for sequence, last in enumerate(self._forest.last):
            ending[last].append(sequence)
        for number in reversed(range(len(segments))):  # parents stand before their children
            segment = segments[number]
            own = segment.length * (1 + (segment.start + segment.stop) / self._even_length) + PATH_COST * segment.start
            if ending[number]:
                waiting[number].append(_Part(tuple(ending[number]), 0, 0.0))
            whole = self._joined(waiting[number], segment.stop, own)
            for part in whole:
                joined = _Part(part.members, part.tokens + segment.length, part.cost + own)
                if segment.parent >= 0:
                    waiting[segment.parent].append(joined)
                else:
                    self._items.append(Item(joined.members, joined.tokens, joined.cost))
        return self._items

    def _joined(self, parts: list[_Part], path: int, cost: float) -> list[_Part]:
        """Join parts below a segment whose path has `path` tokens, into as few as fit."""
        if path + sum(part.tokens for part in parts) <= self._limit:
            bins = [list(range(len(parts)))]
        else:
            bins = first_fit_decreasing([part.tokens for part in parts], self._limit - path)
        return [
            _Part(
                tuple(sorted(member for place in places for member in parts[place].members)),
                sum(parts[place].tokens for place in places),
                sum(parts[place].cost for place in places),
            )
            for places in bins
        ]
