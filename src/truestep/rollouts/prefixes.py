"""Shared prefixes: sequences that begin with the same tokens are a tree of segments, each of which is computed once.

A segment is a run of tokens that follows its parent's. A sequence is a path of segments from a root. Segments are found
from the token ids alone. Example: `[1, 2, 3]` and `[1, 2, 4]` share the segment `[1, 2]`, with the children `[3]` and
`[4]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from truestep.types import Sharing, StepPlan

# What one key of a path costs beside a token's own work, in tokens: attention copies the keys and values of a segment's
# ancestors. On an H200 a copy takes about 1% of a token's time in a model of 1.7B, and others are not far.
PATH_COST = 0.02


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `stop` of the sequence `source`, and of every other sequence that has this segment."""

    parent: int  # -1: a root
    source: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Forest:
    """The segments of some sequences. Each follows its parent, and all that descend from it, before any other."""

    segments: tuple[Segment, ...]
    last: tuple[int, ...]  # the last segment of each sequence's path

    def path(self, segment: int) -> list[int]:
        """Return a segment's ancestors from the root on, and the segment."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = self.segments[segment].parent
        return found[::-1]

    @property
    def sequences(self) -> np.ndarray:  # [segments]
        """How many sequences have each segment."""
        counts = np.bincount(np.array(self.last, np.int64), minlength=len(self.segments))
        for number in reversed(range(len(self.segments))):  # parents stand before their children
            if self.segments[number].parent >= 0:
                counts[self.segments[number].parent] += counts[number]
        return counts

    @cached_property
    def tokens(self) -> int:
        """The tokens that are computed."""
        return sum(segment.length for segment in self.segments)

    @cached_property
    def path_tokens(self) -> int:
        """The keys that all segments see."""
        return sum(segment.stop for segment in self.segments)

    def cost(self, even_length: float) -> float:
        """Estimate the work, in tokens of short documents: products, attention, and the copies of paths."""
        attention = sum(segment.length * (segment.stop + segment.start) for segment in self.segments)
        return self.tokens + attention / even_length + PATH_COST * (self.path_tokens - self.tokens)


def find_segments(sequences: Sequence[np.ndarray], least: int = 1, least_share: float = 0.0) -> Forest:
    """Find the segments that sequences share. A segment that n branches share saves n - 1 times its length; it is
    shared if that is at least `least`, and `least_share` of the tokens of these sequences."""
    order, common = _sorted(sequences)
    ends = np.cumsum([0, *(len(sequences[index]) for index in order)])
    segments: list[Segment] = []
    last = [-1] * len(sequences)
    # Ranges of `order` to divide below `parent`, which ends at the token `begin`. A stack, because a conversation that
    # grows by a token at a time is as deep as it is long.
    waiting = [(0, len(order), 0, -1)] if order else []
    while waiting:
        first, stop, begin, parent = waiting.pop()
        if stop - first == 1:
            index = order[first]
            if begin < len(sequences[index]):
                segments.append(Segment(parent, index, begin, len(sequences[index])))
                parent = len(segments) - 1
            last[index] = parent
            continue
        between = common[first + 1 : stop]
        shared = int(between.min())
        borders = [first, *(first + 1 + np.flatnonzero(between == shared)).tolist(), stop]
        saved = (shared - begin) * (len(borders) - 2)
        if saved >= max(least, 1) and saved >= least_share * (ends[stop] - ends[first] - (stop - first) * begin):
            segments.append(Segment(parent, order[first], begin, shared))
            parent, begin = len(segments) - 1, shared
        # The last range is taken from the stack first.
        waiting += [(*pair, begin, parent) for pair in zip(borders[-2::-1], borders[:0:-1], strict=True)]
    return Forest(tuple(segments), tuple(last))


def _sorted(sequences: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Sort sequences by their tokens. Return the order, and how many first tokens each has in common with the one
    before."""
    keys = [np.asarray(sequence).astype(">u4").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: (keys[index], index))
    common = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        one, other = sequences[order[place - 1]], sequences[order[place]]
        length = min(len(one), len(other))
        apart = one[:length] != other[:length]
        common[place] = int(apart.argmax()) if apart.any() else length
    return order, common


def share(sequences: Sequence[np.ndarray], sharing: Sharing | None) -> Forest | None:
    """Return the segments of a micro-batch's sequences; None if each is computed alone."""
    if sharing is None or len(sequences) < 2:
        return None
    forest = find_segments(sequences, sharing.least)
    if sharing.budget is not None and forest.tokens > sharing.budget:
        forest = find_segments(sequences)
    return forest if forest.tokens < sum(map(len, sequences)) else None


def forest_of(plan: StepPlan, members: tuple[int, ...]) -> Forest | None:
    """Return the segments of a micro-batch of a plan, which keeps them; None if each sequence is computed alone."""
    if members not in plan.forests:
        plan.forests[members] = share([plan.sequences[index].input_ids for index in members], plan.sharing)
    found: Forest | None = plan.forests[members]
    return found
