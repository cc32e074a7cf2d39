"""Documents of which each data rank sees only its own part; ranks that share micro-batches see the same.

Their one global order is by place in a part, then by rank: the first of every part, then the second of every part, and
so on; a part that has come to its end is passed over. It depends on the parts alone, not on steps or budgets.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truestep.ranks.group import Ranks
from truestep.rollouts.files import DataError
from truestep.rollouts.source import FileSource, SourceError, StillSource
from truestep.types import Rejected, Rollout


def next_parts(taken: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Whose documents are the next `count`: of each part, how many are taken and how many there are."""
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
    """`mine` is this rank's part. Every rank asks for the same documents at the same time and gets them all."""

    mine: FileSource
    ranks: Ranks
    finite: bool = True

    def __post_init__(self) -> None:
        ids = self.ranks.gather_parts([document.id for document in self.mine.documents])
        counts = Counter(name for part in ids for name in part)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            parts = [rank for rank, part in enumerate(ids) if repeated[0] in part]
            raise DataError(f"data.path: the parts of ranks {parts} both have a document {repeated[0]!r}")
        self._sizes = self.ranks.gather_parts(self.mine.total)
        if not sum(self._sizes):
            raise DataError("data.path: no part has a record that can be trained on")

    def peek(self, count: int) -> list[Rollout]:
        taken = self.ranks.gather_parts(self.mine.position, ahead=True)
        order = next_parts(taken, self._sizes, count)
        wanted = order.count(self.ranks.data_rank)
        parts = self.ranks.gather_parts(self.mine.peek(wanted), ahead=True)
        cursors = [iter(part) for part in parts]
        return [next(cursors[part]) for part in order]

    def take(self, count: int, documents_seen: int) -> list[Rollout]:
        taken = self.ranks.gather_parts(self.mine.position, ahead=True)
        documents = self.peek(count)
        self.mine.take(next_parts(taken, self._sizes, count).count(self.ranks.data_rank), documents_seen)
        return documents

    def state(self) -> dict[str, Any]:
        return {"parts": self.ranks.gather_parts(self.mine.state(), ahead=True)}

    def restore(self, state: dict[str, Any]) -> None:
        parts = state.get("parts")
        if parts is None or len(parts) != self.ranks.data:
            made = (
                "from one set of files for all ranks" if parts is None else f"by {len(parts)} ranks, each with a part"
            )
            raise SourceError(
                f"data.path: this run's checkpoint was made {made}, and now there are {self.ranks.data} ranks with a "
                "part each ({rank} in data.path); start it as it was, or give another checkpoint.directory"
            )
        self.mine.restore(parts[self.ranks.data_rank])

    def drain_rejected(self) -> list[Rejected]:
        return [record for part in self.ranks.gather_parts(self.mine.drain_rejected()) for record in part]
