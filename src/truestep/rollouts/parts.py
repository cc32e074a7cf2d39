"""A source whose documents are split into one part per data rank.

Ranks that share micro-batches read the same part. The global order is the first document of every part, then the second
of every part, and so on, skipping parts that are exhausted. It depends only on the parts, not on steps or budgets.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from truestep.ranks.group import Ranks
from truestep.rollouts.files import DataError
from truestep.rollouts.source import FileSource, StillSource, Taken, other_source, refuse_other_kind
from truestep.types import Rollout


def next_parts(taken: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Return the part of each of the next `count` documents, given the size of each part and how many were taken."""
    heap = [(position, part) for part, position in enumerate(taken) if position < sizes[part]]
    heapq.heapify(heap)
    order: list[int] = []
    while heap and len(order) < count:
        position, part = heapq.heappop(heap)
        order.append(part)
        if position + 1 < sizes[part]:
            heapq.heappush(heap, (position + 1, part))
    return order


@dataclass
class PartedSource(StillSource):
    """A source of the documents of all parts. Every call is collective, and every rank gets the same documents."""

    plans_ahead = True
    own_part: FileSource
    ranks: Ranks

    def __post_init__(self) -> None:
        ids = self.ranks.gather_parts(self.own_part.ids())
        counts = Counter(name for part in ids for name in part)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            parts = [rank for rank, part in enumerate(ids) if repeated[0] in part]
            raise DataError(f"data.path: the parts of ranks {parts} both have a document {repeated[0]!r}")
        self._sizes = self.ranks.gather_parts(self.own_part.total)
        # This is gathered in the constructor, where no other collective is in flight. When `aside` is called, the
        # gather of the next plan's documents may be in flight.
        asides = self.ranks.gather_parts(self.own_part.aside())
        self._aside = Taken(
            rejected=[record for part in asides for record in part.rejected],
            put_aside=[document for part in asides for document in part.put_aside],
        )
        if not sum(self._sizes):
            raise DataError("data.path: no part has a record that can be trained on")
        self._begin()

    def _begin(self) -> None:
        """Gather the position of each part. After this every rank counts the positions of all parts itself."""
        self._taken = list(self.ranks.gather_parts(self.own_part.position))
        self._peeked: list[Rollout] = []  # peeked at and not yet taken

    def peek(self, count: int) -> list[Rollout]:
        """Return the next documents without taking them. Each is gathered once and kept until it is taken."""
        order = next_parts(self._taken, self._sizes, count)
        missing = len(order) - len(self._peeked)
        if missing > 0:
            own = [part == self.ranks.data_rank for part in order]
            before = sum(own[: len(self._peeked)])
            # Skip this rank's documents that an earlier peek already sent.
            mine = self.own_part.peek(sum(own))[before:]
            cursors = [iter(part) for part in self.ranks.gather_parts(mine, ahead=True)]
            self._peeked += [next(cursors[part]) for part in order[len(self._peeked) :]]
        return self._peeked[:count]

    def take(self, count: int, documents_seen: int) -> Taken:
        documents = self.peek(count)
        for part in next_parts(self._taken, self._sizes, count):
            self._taken[part] += 1
        self.own_part.take(self._taken[self.ranks.data_rank] - self.own_part.position, documents_seen)
        self._peeked = self._peeked[len(documents) :]
        return replace(self.aside(), documents=documents)

    def aside(self) -> Taken:
        aside, self._aside = self._aside, Taken()
        return aside

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Record this rank's position; the returned function gathers the positions of all ranks."""
        own = self.own_part.snapshot()
        return lambda: {"parts": self.ranks.gather_parts(own())}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_kind("data.path", "parts", state)
        parts = state["parts"]
        if len(parts) != self.ranks.data:
            raise other_source("data.path", f"the parts of {len(parts)} ranks", f"those of {self.ranks.data}")
        self.own_part.restore(parts[self.ranks.data_rank])
        self._begin()
