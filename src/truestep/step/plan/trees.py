"""Items of a plan: sequences in one micro-batch, because they share a prefix.

A tree of sequences that exceeds a limit is divided into parts. Each part computes the common prefix again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from truestep.rollouts.packing import first_fit_decreasing
from truestep.rollouts.prefixes import PATH_COST, Forest, find_segments

# Sequences are kept in one micro-batch for a prefix only if sharing it saves at least this share of their tokens. A
# shorter prefix, such as the start of a chat template, is shared only if its sequences are in one micro-batch anyway.
_TIES = 0.05


@dataclass(frozen=True)
class Item:
    """Sequences that must be in one micro-batch."""

    members: tuple[int, ...]
    tokens: int  # number of computed tokens
    cost: float  # in units of one token of a short document


@dataclass(frozen=True)
class _Part:
    """Some of the sequences that continue one segment."""

    members: tuple[int, ...]
    tokens: int  # computed tokens, without those of the segment and its ancestors
    cost: float


def find_ties(sequences: Sequence[np.ndarray], least: int) -> Forest:
    """Find the segments that keep sequences in one micro-batch. `least`: how many tokens a segment must save."""
    return find_segments(sequences, least, _TIES)


def make_items(forest: Forest, limit: int, even_length: float) -> list[Item]:
    """Divide sequences into items of at most `limit` tokens. No single sequence may exceed the limit."""
    return _Divider(forest, limit, even_length).items()


class _Divider:
    def __init__(self, forest: Forest, limit: int, even_length: float):
        self._forest, self._limit, self._even_length = forest, limit, even_length
        self._items: list[Item] = []

    def items(self) -> list[Item]:
        """Go through the segments, children before parents. Pass the parts of each segment on to its parent. Parts that
        cannot be joined within the limit stay separate, and each part of a root becomes an item."""
        segments = self._forest.segments
        waiting: list[list[_Part]] = [[] for _ in segments]  # the parts below each segment
        ending: list[list[int]] = [[] for _ in segments]
        for sequence, last in enumerate(self._forest.last):
            ending[last].append(sequence)
        for number in reversed(range(len(segments))):  # parents come before their children
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
        """Join the parts of a segment into as few as fit the limit. `path`: the tokens of the segment and its
        ancestors."""
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
