"""A source that the first rank reads and shares with all ranks, such as a stream or a sampler."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from truestep.ranks.group import Ranks
from truestep.rollouts.source import PeekableSource, Source, Taken, never
from truestep.types import Rejected, Rollout


class SharedSource:
    """A source that exists on the first rank only. Its exceptions are raised on every rank."""

    plans_ahead = False

    def __init__(self, source: Source | None, ranks: Ranks):
        """`source` is None on every rank except the first."""
        self._source, self._ranks = source, ranks
        self._asked_to_stop: Callable[[], bool] = never
        self.waits_for_checkpoints = source is not None and source.waits_for_checkpoints

    @property
    def asked_to_stop(self) -> Callable[[], bool]:
        return self._asked_to_stop

    @asked_to_stop.setter
    def asked_to_stop(self, asked: Callable[[], bool]) -> None:
        self._asked_to_stop = asked
        if self._source is not None:
            self._source.asked_to_stop = asked

    @property
    def _of_first(self) -> Source:
        assert self._source is not None
        return self._source

    def take(self, count: int, documents_seen: int) -> Taken:
        on_first: list[Taken] = []

        def take() -> Sequence[Rollout]:
            on_first.append(self._of_first.take(count, documents_seen))
            return on_first[0].documents

        documents = self._ranks.share(take)
        return on_first[0] if on_first else Taken(documents)  # only the first rank logs refused and put-aside records

    def aside(self) -> Taken:
        return Taken() if self._source is None else self._source.aside()

    @property
    def put_rejected(self) -> Callable[[Sequence[Rejected]], None] | None:
        return None if self._source is None else self._source.put_rejected

    @put_rejected.setter
    def put_rejected(self, put: Callable[[Sequence[Rejected]], None] | None) -> None:
        if self._source is not None:
            self._source.put_rejected = put

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return self._of_first.snapshot() if self._ranks.first else dict  # the first rank writes checkpoints

    def restore(self, state: dict[str, Any]) -> None:
        self._ranks.share(lambda: self._of_first.restore(state))

    def checkpointed(self, documents_seen: int) -> None:
        if self._source is not None:
            self._source.checkpointed(documents_seen)

    def close(self, finished: bool) -> None:
        if self._source is not None:
            self._source.close(finished)


class SharedPeekableSource(SharedSource):
    """A shared source whose next documents can be peeked at."""

    _peeked: Sequence[Rollout] = ()  # peeked at and not yet taken; kept so that they are sent to other ranks once

    def peek(self, count: int) -> Sequence[Rollout]:
        self._peeked = self._ranks.share(lambda: cast(PeekableSource, self._of_first).peek(count))
        return self._peeked

    def take(self, count: int, documents_seen: int) -> Taken:
        peeked, self._peeked = self._peeked, ()
        if len(peeked) < count:
            return super().take(count, documents_seen)
        return Taken(peeked[:count]) if self._source is None else self._source.take(count, documents_seen)
