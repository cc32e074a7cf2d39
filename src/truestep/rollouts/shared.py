"""The first rank's documents, on every rank: one process reads a stream, and all see the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from truestep.ranks.group import Ranks
from truestep.rollouts.source import Source, never
from truestep.types import Rejected, Rollout


class SharedSource:
    """`source` is there on the first rank alone. What it raises, every rank raises. `finite` is as the source's."""

    def __init__(self, source: Source | None, ranks: Ranks, finite: bool = True):
        self._source, self._ranks, self.finite = source, ranks, finite
        self._asked_to_stop: Callable[[], bool] = never
        self._seen: Sequence[Rollout] = ()  # what was looked at last, and not yet taken: told once

    @property
    def asked_to_stop(self) -> Callable[[], bool]:
        return self._asked_to_stop

    @asked_to_stop.setter
    def asked_to_stop(self, asked: Callable[[], bool]) -> None:
        self._asked_to_stop = asked
        if self._source is not None:
            self._source.asked_to_stop = asked

    @property
    def _mine(self) -> Source:
        assert self._source is not None
        return self._source

    def peek(self, count: int) -> Sequence[Rollout]:
        self._seen = self._ranks.share(lambda: self._mine.peek(count))
        return self._seen

    def take(self, count: int, documents_seen: int) -> Sequence[Rollout]:
        seen, self._seen = self._seen, ()
        if len(seen) < count:
            return self._ranks.share(lambda: self._mine.take(count, documents_seen))
        if self._source is not None:
            self._source.take(count, documents_seen)
        return seen[:count]

    def state(self) -> dict[str, Any]:
        return self._mine.state() if self._ranks.first else {}  # the first rank writes checkpoints

    def restore(self, state: dict[str, Any]) -> None:
        self._ranks.share(lambda: self._mine.restore(state))

    def drain_rejected(self) -> list[Rejected]:
        return [] if self._source is None else self._source.drain_rejected()  # the first rank writes them down

    def updated(self, documents_seen: int) -> None:
        if self._source is not None:
            self._source.updated(documents_seen)

    def checkpointed(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        if self._source is not None:
            self._source.checkpointed(checkpoint, step, documents_seen)

    def close(self, finished: bool) -> None:
        if self._source is not None:
            self._source.close(finished)
