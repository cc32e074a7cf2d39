"""Shared prefixes: sequences that begin with the same tokens form a tree of segments, and each segment is computed
once.

A segment is a run of tokens that follows the tokens of its parent. A sequence is a path of segments from a root. Tokens
are shared if their ids are equal and, where experts are replayed, their experts too. Example: `[1, 2, 3]` and `[1, 2,
4]` share the segment `[1, 2]`, with the children `[3]` and `[4]`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from truestep.types import Rollout, Sharing, StepPlan

# The cost of one key of a path, as a fraction of a token's own work: attention copies the keys and values of a
# segment's ancestors. On an H200, a copy takes about 1% of a token's time in a model of 1.7B parameters. Other models
# are similar.
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
    """The segments of some sequences, depth first: each segment is followed by all its descendants."""

    segments: tuple[Segment, ...]
    last: tuple[int, ...]  # the last segment of each sequence's path

    def path(self, segment: int) -> list[int]:
        """Return the path from the root to a segment, including the segment."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = self.segments[segment].parent
        return found[::-1]

    @property
    def sequences(self) -> np.ndarray:  # [segments]
        """The number of sequences that contain each segment."""
        counts = np.bincount(np.array(self.last, np.int64), minlength=len(self.segments))
        for number in reversed(range(len(self.segments))):  # parents come before their children
            if self.segments[number].parent >= 0:
                counts[self.segments[number].parent] += counts[number]
        return counts

    @cached_property
    def tokens(self) -> int:
        """The number of tokens that are computed."""
        return sum(segment.length for segment in self.segments)

    @cached_property
    def path_tokens(self) -> int:
        """The number of keys that the segments' last tokens attend to, summed over the segments."""
        return sum(segment.stop for segment in self.segments)

    def cost(self, even_length: float) -> float:
        """Estimate the work of matrix products, attention and the copies of paths. The unit is the work for one token
        of a short document."""
        attention = sum(segment.length * (segment.stop + segment.start) for segment in self.segments)
        return self.tokens + attention / even_length + PATH_COST * (self.path_tokens - self.tokens)


def find_segments(sequences: Sequence[np.ndarray], least: int = 1, least_share: float = 0.0) -> Forest:
    """Find the segments that sequences share. A segment that n branches share saves n - 1 times its length. It is
    shared only if this saving is at least `least` tokens, and at least `least_share` of the tokens of the branches
    without the largest one: so a short branch at the beginning of a long conversation stays with it."""
    order, common = _sorted(sequences)
    ends = np.cumsum([0, *(len(sequences[index]) for index in order)])
    segments: list[Segment] = []
    last = [-1] * len(sequences)
    # Ranges of `order` to divide below `parent`, which ends at the token `begin`. This is a stack and not a recursion,
    # because the tree of a conversation that grows by one token at a time is as deep as the conversation is long.
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
        # tokens of all branches but the largest, from `begin` on
        sizes = ends[borders[1:]] - ends[borders[:-1]] - np.diff(borders) * begin
        if saved >= max(least, 1) and saved >= least_share * (sizes.sum() - sizes.max()):
            segments.append(Segment(parent, order[first], begin, shared))
            parent, begin = len(segments) - 1, shared
        # The last range is taken from the stack first.
        waiting += [(*pair, begin, parent) for pair in zip(borders[-2::-1], borders[:0:-1], strict=True)]
    return Forest(tuple(segments), tuple(last))


def identities(documents: Sequence[Rollout], alike: Collection[str] = ()) -> list[np.ndarray]:
    """Return a number for each token of each document. Two tokens have equal numbers if their ids and their fields
    named in `alike` are equal."""
    return [_identity(document, alike) for document in documents]


def _identity(document: Rollout, alike: Collection[str]) -> np.ndarray:
    found = document.input_ids
    for name in sorted(alike):
        values = document.value(name)
        if values is None:
            continue
        width = math.prod(values.shape[1:])
        rows = np.zeros((len(found), -(-width // 4) * 4), np.uint16)
        # A token without a row counts as one whose values are all -1, as in a document of several sequences.
        rows[: len(values), :width] = values.reshape(len(values), width).astype(np.uint16) + np.uint16(1)
        found = _mix(found.astype(np.uint64))
        for words in np.ascontiguousarray(rows.view(np.uint64).T):
            found = _mix(found ^ words)
    return found


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Map 64-bit numbers one-to-one to well-mixed 64-bit numbers (the mixing step of splitmix64)."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = numbers ^ (numbers >> np.uint64(32))
    return mixed


def _sorted(sequences: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Sort sequences by their tokens. Return the order, and for each sequence the length of the prefix that it shares
    with the one before it."""
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
    """Return the segments of a micro-batch's sequences; None if no tokens are shared."""
    if sharing is None or len(documents) < 2:
        return None
    sequences = identities(documents, sharing.alike)
    forest = find_segments(sequences, sharing.least)
    if sharing.budget is not None and forest.tokens > sharing.budget:
        forest = find_segments(sequences)
    return forest if forest.tokens < sum(map(len, sequences)) else None


def forest_of(plan: StepPlan, members: tuple[int, ...]) -> Forest | None:
    """Return the segments of a plan's micro-batch; None if no tokens are shared. The plan caches the result."""
    if members not in plan.forests:
        plan.forests[members] = share([plan.sequences[index] for index in members], plan.sharing)
    found: Forest | None = plan.forests[members]
    return found
