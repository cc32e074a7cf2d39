"""The sources of documents: each an ordered stream with a position that a checkpoint can hold."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from truestep.errors import TruestepError
from truestep.rollouts.table.documents import TableDocuments
from truestep.rollouts.table.layout import content_digest
from truestep.types import PutAside, Rejected, Rollout

_AT_A_TIME = 1 << 16  # documents that a fingerprint goes over


class SourceError(TruestepError):
    """Documents that are missing, or are not those that a checkpoint was made with."""


class Interrupted(Exception):  # noqa: N818  (nothing is wrong)
    """The run was asked to stop while a source waited for documents. Nothing was taken."""


def never() -> bool:
    return False


_KINDS = {  # by the key that a source's state in a checkpoint has
    "position": "rollout files that every rank reads",
    "parts": "rollout files of which each rank reads a part",
    "transport": "documents that are sent",
    "groups": "the prompts of a sampler",
}


def refuse_other_kind(option: str, kind: str, state: dict[str, Any]) -> None:
    """Raise an error where a checkpoint's state was made by another kind of source. `kind` is a key of `_KINDS`."""
    if kind not in state:
        before = next((words for key, words in _KINDS.items() if key in state), "another source")
        raise other_source(option, before, _KINDS[kind])


def other_source(option: str, before: str, now: str) -> SourceError:
    """Word the refusal of a checkpoint whose documents came from elsewhere."""
    return SourceError(
        f"{option}: this run's checkpoint was made from {before}, not from {now}; give it the same, or another "
        "checkpoint.directory"
    )


@dataclass(frozen=True)
class Taken:
    """What a source hands over: documents, and what it refused, put aside and measured since it last handed over."""

    documents: Sequence[Rollout] = ()
    rejected: Sequence[Rejected] = ()  # records that were refused, each with the reason
    put_aside: Sequence[PutAside] = ()  # good documents that no step takes
    # For the step's line: how its documents were made. All ranks give the same names; the largest number is logged.
    measured: Mapping[str, float] = field(default_factory=dict)


class Source(Protocol):
    """All that a step and a checkpoint need of any source."""

    # True where its documents do not depend on what a step does: the next step's plan may be made during this step.
    plans_ahead: bool
    # True where its next documents may only come when it was told of a checkpoint: the run waits for each save.
    waits_for_checkpoints: bool
    asked_to_stop: Callable[[], bool]  # a source that waits for others looks at this and raises `Interrupted`

    def take(self, count: int, documents_seen: int) -> Taken:
        """Take the next documents, which are never given again. The policy has seen `documents_seen` documents before
        this call, and what is made for it has this version."""
        ...

    def aside(self) -> Taken:
        """Hand over what `take` would, without any document: before the first step, at the end of the data, and where a
        step takes no new documents."""
        ...

    # Called with refused records that no `take` hands over: those of one that fails, and those that come while a source
    # waits, of which there may be more than memory should hold.
    put_rejected: "Callable[[Sequence[Rejected]], None] | None"

    def state(self) -> dict[str, Any]:
        """Describe, as JSON, where the source stands."""
        ...

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Note where the source stands, at every step and so cheaply; give a function that makes the state of it, for
        the few steps that are saved. All ranks call it, or none."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def checkpointed(self, documents_seen: int) -> None:
        """Take note that a checkpoint after so many documents is complete: its state survives any kill from now on."""
        ...

    def close(self, finished: bool) -> None:
        """Take note that the run has ended, or stopped early where not `finished`."""
        ...


@runtime_checkable
class PeekableSource(Source, Protocol):
    """A source that has an end, and whose documents can be looked at before they are taken."""

    def peek(self, count: int) -> Sequence[Rollout]:
        """Look at the next `count` documents without taking them; fewer only at the end of the data."""
        ...


class StillSource:
    """A base for sources that do not react to checkpoints, the end or a request to stop."""

    plans_ahead = False
    waits_for_checkpoints = False
    asked_to_stop: Callable[[], bool] = staticmethod(never)
    put_rejected: Callable[[Sequence[Rejected]], None] | None = None

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Make the state at once, as suits a source whose state is a few numbers."""
        state = self.state()
        return lambda: state

    def checkpointed(self, documents_seen: int) -> None: ...

    def close(self, finished: bool) -> None: ...


@dataclass
class FileSource(StillSource):
    """Documents of files, in file order or a seeded shuffle of it, `epochs` times over."""

    plans_ahead = True
    documents: Sequence[Rollout]
    rejected: tuple[Rejected, ...] = ()
    epochs: int = 1
    shuffle_seed: int | None = None  # None: file order
    position: int = 0  # over all epochs
    put_aside: tuple[PutAside, ...] = ()
    _orders: dict[int, np.ndarray] = field(default_factory=dict)
    _peeked: dict[int, Rollout] = field(default_factory=dict)  # by position
    _digest: Any = None  # of the first `_hashed` documents
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
        # What was looked at is kept until it is taken: a document may have to be read.
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
        if isinstance(self.documents, TableDocuments):
            return self.documents.ids(start, stop)
        return [document.id for document in self.documents[start:stop]]

    def _contents(self, start: int, stop: int) -> list[bytes]:
        """Digest the tokens and labels of each document."""
        if isinstance(self.documents, TableDocuments):
            return self.documents.digests(start, stop)
        return [content_digest(document.input_ids, document.loss_mask) for document in self.documents[start:stop]]

    def _fingerprint(self, position: int) -> str:
        """Digest the order and the documents before `position`. A file may grow after this place, never before it."""
        seen = len(self.documents) if position >= len(self.documents) or self.shuffle_seed is not None else position
        if self._digest is None or self._hashed > seen:
            self._digest, self._hashed = hashlib.sha256(f"{self.shuffle_seed}\n".encode()), 0
        for start in range(self._hashed, seen, _AT_A_TIME):  # each once: a position is asked for at every step
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
