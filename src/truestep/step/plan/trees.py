"""Items of a plan. An item is sequences that must be in one micro-batch, because they share a prefix.

A tree of sequences that exceeds a limit is divided into parts. Each part computes the common prefix again.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from truestep.ranks.axes import RankError
from truestep.rollouts.packing import first_fit_decreasing
from truestep.rollouts.prefixes import PATH_COST, Forest, find_segments, identities
from truestep.types import Rollout, facts_of

# A prefix keeps its sequences in one micro-batch only if sharing it saves at least this share of their tokens (not
# counting the largest branch). A shorter prefix, such as the start of a chat template, is shared only if its sequences
# are in one micro-batch anyway.
_TIES = 0.05


@dataclass(frozen=True)
class Item:
    """Sequences that must be in one micro-batch."""

    members: tuple[int, ...]
    tokens: int  # number of computed tokens
    cost: float  # in units of one token of a short document


@dataclass(frozen=True)
class Packables:
    """Items in columns, to be packed into micro-batches. A large step has hundreds of thousands of them."""

    members: Sequence[tuple[int, ...]]
    tokens: Sequence[int]
    costs: Sequence[float]
    distinct: int = 0  # the number of tokens if each shared prefix were computed once

    @staticmethod
    def of(items: Sequence[Item], distinct: int) -> "Packables":
        return Packables(
            [item.members for item in items],
            [item.tokens for item in items],
            [item.cost for item in items],
            distinct,
        )

    @staticmethod
    def alone(lengths: Sequence[int], even_length: float) -> "Packables":
        """Make an item of each sequence. `even_length`: the length at which attention costs as much as matrix
        products."""
        tokens = np.asarray(lengths, np.int64)
        return Packables([(index,) for index in range(len(lengths))], lengths, _cost(tokens, even_length).tolist())

    @staticmethod
    def joined(parts: "Sequence[Packables]") -> "Packables":
        return Packables(
            [each for part in parts for each in part.members],
            [each for part in parts for each in part.tokens],
            [each for part in parts for each in part.costs],
            sum(part.distinct for part in parts),
        )

    def moved(self, start: int) -> "Packables":
        """Return these items with `start` added to the indices of their sequences."""
        return replace(self, members=[tuple([start + index for index in each]) for each in self.members])

    @property
    def cost(self) -> float:
        return math.fsum(self.costs)

    def least_cost(self, ranks: int) -> float:
        """Return the cost of a step whose ranks are all equally busy."""
        return self.cost / ranks

    def divided(self, first: Sequence[bool]) -> "tuple[Packables, Packables]":
        """Return the items that `first` marks, and the others."""
        places = ([place for place, one in enumerate(first) if one is wanted] for wanted in (True, False))
        marked, others = map(self._chosen, places)
        return marked, others

    def _chosen(self, places: Sequence[int]) -> "Packables":
        return Packables(
            [self.members[place] for place in places],
            [self.tokens[place] for place in places],
            [self.costs[place] for place in places],
        )


def _cost(tokens: np.ndarray, even_length: float) -> np.ndarray:
    """Estimate the cost of documents, in units of one token of a short document."""
    cost: np.ndarray = tokens * (1 + tokens / even_length)
    return cost


@dataclass(frozen=True)
class _Part:
    """Some of the sequences that continue one segment."""

    members: tuple[int, ...]
    tokens: int  # computed tokens, without those of the segment and its ancestors
    cost: float


@dataclass(frozen=True)
class Spread:
    """How data ranks share the search for prefixes in a large step: each searches a part of the sequences."""

    rank: int  # this data rank
    gather: Callable[[Any], list[Any]]  # returns the values of all data ranks, in order


@dataclass(frozen=True)
class _Found:
    """The items that a rank found in its part of a step's sequences."""

    seen: str  # a digest of the step's sequences
    items: list[Packables]  # for each limit


_SPREAD = 1 << 15  # in a step of at least so many sequences, all ranks find prefixes together


def find_items(
    sequences: Sequence[Rollout], alike: Collection[str], least: int, limits: Sequence[int], even_length: float
) -> list[Packables]:
    """Return the items for each limit of a tree's tokens. `alike`, `least`: as in `identities` and `find_ties`."""
    forest = find_ties(identities(sequences, alike), least)
    return [Packables.of(make_items(forest, limit, even_length), forest.tokens) for limit in limits]


def find_items_together(
    sequences: Sequence[Rollout],
    alike: Collection[str],
    least: int,
    limits: Sequence[int],
    even_length: float,
    spread: Spread | None,
    ranks: int,
) -> list[Packables]:
    """Find items. In a large step each rank searches the sequences of some groups, and the items are gathered. The
    result is that of `find_items`, except that groups of different ranks do not share a prefix, such as a system
    prompt: each computes it again."""
    if spread is None or len(sequences) < _SPREAD:
        return find_items(sequences, alike, least, limits, even_length)
    part = parts_of_groups(sequences, ranks)[spread.rank]
    own = find_items(sequences[part.start : part.stop], alike, least, limits, even_length)
    mine = _Found(_digest(sequences), [each.moved(part.start) for each in own])
    gathered = spread.gather(mine)
    # A rank with other data may have sent another value, or one of another exchange.
    others = [rank for rank, found in enumerate(gathered) if not isinstance(found, _Found) or found.seen != mine.seen]
    if others:
        raise RankError(
            f"data rank{'s' * (len(others) > 1)} {_numbers(others)} and data rank {spread.rank} plan different steps: "
            "they do not see the same data or configuration. The step was not computed"
        )
    return [Packables.joined([found.items[number] for found in gathered]) for number in range(len(limits))]


def _digest(sequences: Sequence[Rollout]) -> str:
    return hashlib.sha256(facts_of(sequences).tobytes()).hexdigest()


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def parts_of_groups(sequences: Sequence[Rollout], count: int) -> list[range]:
    """Divide sequences into `count` parts with similar numbers of sequences, which end where groups end."""
    borders = [0]
    for number in range(1, count):
        place = max(borders[-1], number * len(sequences) // count)
        while 0 < place < len(sequences) and _same_group(sequences[place - 1], sequences[place]):
            place += 1
        borders.append(place)
    return [range(*pair) for pair in pairwise((*borders, len(sequences)))]


def _same_group(one: Rollout, other: Rollout) -> bool:
    return one.group_id is not None and one.group_id == other.group_id


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
        """Join the parts of each segment, children before parents, and pass them on to the parent. Parts that cannot be
        joined within the limit stay separate. Each part of a root becomes an item."""
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
