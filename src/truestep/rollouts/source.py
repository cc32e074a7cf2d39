"""The interface of document sources, and the source of rollout files.

A source is an ordered stream of documents with a position that a checkpoint stores.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from truestep.errors import TruestepError
from truestep.rollouts.stored import StoredDocuments, content_digest
from truestep.types import PutAside, Rejected, Rollout

_AT_A_TIME = 1 << 16  # documents per update of the fingerprint


class SourceError(TruestepError):
    """Missing documents, or documents that differ from the checkpoint's."""


class Interrupted(Exception):  # noqa: N818  (nothing is wrong)
    """The run was asked to stop while a source waited for documents. Nothing was taken."""


def never() -> bool:
    return False


_KINDS = {  # kinds of sources, by a key that only the state of that kind has
    "position": "rollout files that every rank reads",
    "parts": "rollout files of which each rank reads a part",
    "transport": "documents that are sent",
    "groups": "the prompts of a sampler",
}


def refuse_other_kind(option: str, kind: str, state: dict[str, Any]) -> None:
    """Raise `SourceError` if a checkpoint's state comes from another kind of source. `kind` is a key of `_KINDS`."""
    if kind not in state:
        before = next((words for key, words in _KINDS.items() if key in state), "another source")
        raise other_source(option, before, _KINDS[kind])


def other_source(option: str, before: str, now: str) -> SourceError:
    """Return the error for a checkpoint whose documents came from another source."""
    return SourceError(
        f"{option}: this run's checkpoint was made from {before}, not from {now}; give it the same, or another "
        "checkpoint.directory"
    )


@dataclass(frozen=True)
class Taken:
    """The documents of a `take`, and the records refused, documents put aside and metrics since the previous call."""

    documents: Sequence[Rollout] = ()
    rejected: Sequence[Rejected] = ()  # records that were refused, each with the reason
    put_aside: Sequence[PutAside] = ()  # good documents that no step takes
    # Metrics of how the documents were made. All ranks have the same names; the step logs the largest value.
    measured: Mapping[str, float] = field(default_factory=dict)


class Source(Protocol):
    """The interface that steps and checkpoints use."""

    # True if documents do not depend on the step in progress: the next step may be planned during this step.
    plans_ahead: bool
    # True if further documents may need a completed checkpoint first: the run waits for each save.
    waits_for_checkpoints: bool
    asked_to_stop: Callable[[], bool]  # a waiting source polls this and raises `Interrupted` when it returns true

    def take(self, count: int, documents_seen: int) -> Taken:
        """Return the next `count` documents and move past them.

        `documents_seen` counts the documents that the policy was trained on. It is the version of new documents.
        """
        ...

    def aside(self) -> Taken:
        """Return everything that `take` would, except documents.

        Called before the first step, at the end of the data, and when a step takes no new documents.
        """
        ...

    # Called with refused records that no `take` returns: records of a `take` that raises, and records that arrive while
    # a source waits, which could be too many to keep in memory.
    put_rejected: "Callable[[Sequence[Rejected]], None] | None"

    def state(self) -> dict[str, Any]:
        """Return the source's position for a checkpoint, as JSON values."""
        ...

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Record the position cheaply, at every step, and return a function that builds the state for a checkpoint.

        The returned function is collective: all ranks call it, or none.
        """
        ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def checkpointed(self, documents_seen: int) -> None:
        """Called when a checkpoint after `documents_seen` documents is complete, so that it survives a kill."""
        ...

    def close(self, finished: bool) -> None:
        """Called at the end of the run. `finished` is false if the run stopped early."""
        ...


@runtime_checkable
class PeekableSource(Source, Protocol):
    """A source that ends, and whose next documents can be peeked at."""

    def peek(self, count: int) -> Sequence[Rollout]:
        """Return the next `count` documents without taking them; fewer only at the end of the data."""
        ...


@runtime_checkable
class StepSource(Source, Protocol):
    """A source whose documents are divided into steps already."""

    def take_step(self) -> Taken | None:
        """Return all documents of the next step; None at the end."""
        ...


class StillSource:
    """A base class for sources that ignore checkpoints, the end of the run and requests to stop."""

    plans_ahead = False
    waits_for_checkpoints = False
    asked_to_stop: Callable[[], bool] = staticmethod(never)
    put_rejected: Callable[[Sequence[Rejected]], None] | None = None

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Build the state immediately, since it is only a few numbers."""
        state = self.state()
        return lambda: state

    def checkpointed(self, documents_seen: int) -> None: ...

    def close(self, finished: bool) -> None: ...


@dataclass
class FileSource(StillSource):
    """A source of rollout files, in file order or shuffled by a seed, for `epochs` epochs."""

    plans_ahead = True
    documents: Sequence[Rollout]
    rejected: tuple[Rejected, ...] = ()
    epochs: int = 1
    shuffle_seed: int | None = None  # None: file order
    position: int = 0  # the number of documents taken, over all epochs
    put_aside: tuple[PutAside, ...] = ()
    _orders: dict[int, np.ndarray] = field(default_factory=dict)
    _peeked: dict[int, Rollout] = field(default_factory=dict)  # by position
    _digest: Any = None  # the digest of the first `_hashed` documents
    _hashed: int = 0

    @property
    def total(self) -> int:
        """The number of documents over all epochs."""
        return self.epochs * len(self.documents)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            order = np.arange(len(self.documents))
            if self.shuffle_seed is not None:
                order = np.random.default_rng([self.shuffle_seed, epoch]).permutation(len(self.documents))
            self._orders = {kept: self._orders[kept] for kept in self._orders if kept >= epoch - 1} | {epoch: order}
        return self._orders[epoch]

    def _at(self, position: int) -> Rollout:
        epoch, index = divmod(position, len(self.documents))
        return self.documents[self._order(epoch)[index]]

    def peek(self, count: int) -> list[Rollout]:
        end = min(self.position + count, self.total)
        # Peeked documents are kept until they are taken, since reading a document from a file costs time.
        read = {at: self._peeked[at] if at in self._peeked else self._at(at) for at in range(self.position, end)}
        self._peeked |= read
        return list(read.values())

    def take(self, count: int, documents_seen: int) -> Taken:
        documents = self.peek(count)
        self.position += len(documents)
        self._peeked = {at: document for at, document in self._peeked.items() if at >= self.position}
        return replace(self.aside(), documents=documents)

    def aside(self) -> Taken:
        aside = Taken((), self.rejected, self.put_aside)
        self.rejected = self.put_aside = ()
        return aside

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        if isinstance(self.documents, StoredDocuments):
            return self.documents.ids(start, stop)
        return [document.id for document in self.documents[start:stop]]

    def _contents(self, start: int, stop: int) -> list[bytes]:
        """Return the digest of each document's tokens and labels."""
        if isinstance(self.documents, StoredDocuments):
            return self.documents.digests(start, stop)
        return [content_digest(document.input_ids, document.loss_mask) for document in self.documents[start:stop]]

    def _fingerprint(self, position: int) -> str:
        """Return a digest of the order and of the documents before `position`; files may grow after that position."""
        seen = len(self.documents) if position >= len(self.documents) or self.shuffle_seed is not None else position
        if self._digest is None or self._hashed > seen:
            self._digest, self._hashed = hashlib.sha256(f"{self.shuffle_seed}\n".encode()), 0
        for start in range(self._hashed, seen, _AT_A_TIME):  # incremental: the fingerprint is computed at every step
            stop = min(start + _AT_A_TIME, seen)
            contents = zip(self.ids(start, stop), self._contents(start, stop), strict=True)
            self._digest.update(b"".join(f"{name}\n".encode() + content for name, content in contents))
        self._hashed = seen
        return self._digest.copy().hexdigest()

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "fingerprint": self._fingerprint(self.position)}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_kind("data.path", "position", state)
        if self._fingerprint(state["position"]) != state["fingerprint"]:
            raise SourceError(
                "data.path: the documents that this run was trained on are no longer those in the files, or seed or "
                "data.shuffle was changed; give it the same files in the same order (they may have grown at the end, "
                "unless shuffled), or another checkpoint.directory"
            )
        self.position, self._peeked = state["position"], {}
