"""Shared prefixes: sequences that begin with the same tokens are a tree of segments, each of which is computed once.

A segment is a run of tokens that follows its parent's. A sequence is a path of segments from a root. Segments are found
from the token ids, and where experts are replayed from the experts, too. Example: `[1, 2, 3]` and `[1, 2, 4]` share the
segment `[1, 2]`, with the children `[3]` and `[4]`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from truestep.types import Rollout, Sharing, StepPlan

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


def identities(documents: Sequence[Rollout], alike: Collection[str] = ()) -> list[np.ndarray]:
    """Return numbers for each document's tokens that are equal where ids and the fields of tokens named `alike` are."""
    return [_identity(document, alike) for document in documents]


def _identity(document: Rollout, alike: Collection[str]) -> np.ndarray:
    found = document.input_ids
    for name in sorted(alike):
        values = document.value(name)
        if values is None:
            continue
        width = math.prod(values.shape[1:])
        rows = np.zeros((len(found), -(-width // 4) * 4), np.uint16)
        # A token without a row is like one whose values are -1, as in a document of several sequences.
        rows[: len(values), :width] = values.reshape(len(values), width).astype(np.uint16) + np.uint16(1)
        found = _mix(found.astype(np.uint64))
        for words in np.ascontiguousarray(rows.view(np.uint64).T):
            found = _mix(found ^ words)
    return found


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Spread 64-bit numbers over all 64-bit numbers, one to one (the mixing of splitmix64)."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = numbers ^ (numbers >> np.uint64(32))
    return mixed


def _sorted(sequences: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Sort sequences by their tokens. Return the order, and how many first tokens each has in common with the one
    before."""
    keys = [np.asarray(sequence).astype(">u8").tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: (keys[index], index))
    common = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        one, other = sequences[order[place - 1]], sequences[order[place]]
        length = min(len(one), len(other))
        apart = one[:length] != other[:length]
        common[place] = int(apart.argmax()) if apart.any() else length
    return order, common


def share(documents: Sequence[Rollout], sharing: Sharing | None) -> Forest | None:
    """Return the segments of a micro-batch's sequences; None if each is computed alone."""
    if sharing is None or len(documents) < 2:
        return None
    sequences = identities(documents, sharing.alike)
    forest = find_segments(sequences, sharing.least)
    if sharing.budget is not None and forest.tokens > sharing.budget:
        forest = find_segments(sequences)
    return forest if forest.tokens < sum(map(len, sequences)) else None


def forest_of(plan: StepPlan, members: tuple[int, ...]) -> Forest | None:
    """Return the segments of a micro-batch of a plan, which keeps them; None if each sequence is computed alone."""
    if members not in plan.forests:
        plan.forests[members] = share([plan.sequences[index] for index in members], plan.sharing)
    found: Forest | None = plan.forests[members]
    return found
