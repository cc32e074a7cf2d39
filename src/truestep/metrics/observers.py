"""Observers: objects called on events of a run. They do not change the computation.

The user's callbacks, the sinks, the recorder of rollouts and the publication of new weights are observers. To add an
observer, derive from `Observer`, and add it to the list in `run/assemble/observers.py`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from truestep.types import DocumentScore, Rejected, Rollout, StepPlan

_T = TypeVar("_T")


class Computed(Protocol):
    """The results of a step: its line of metrics, and the scores that observers asked for."""

    @property
    def scores(self) -> tuple[DocumentScore, ...]: ...

    def line(self) -> dict[str, Any]: ...


class Observer:
    """A base class of observers whose methods do nothing. Every rank calls the observers in the same order."""

    def started(self) -> None:
        """Called before the first step of this start, after the checkpoint is restored."""

    def rejected(self, records: Sequence[Rejected]) -> None:
        """Called with rejected records, as soon as the run has rejected them."""

    def rollouts(self, documents: Sequence[Rollout]) -> None:
        """Called with the documents of a step, in their order, before the step is computed."""

    def wanted(self, plan: StepPlan) -> Collection[int]:
        """Return the indices of the plan's documents whose scores `trained` needs; the same on every rank."""
        return ()

    def computing(self, step: int, plan: StepPlan) -> None:
        """Called when this process waits for a GPU that still computes the step's gradient."""

    def gradient(self, plan: StepPlan, computed: Computed, norm: float) -> None:
        """Called with a step's gradient in its buffers, before it is clipped and used."""

    def updated(self, step: int, documents_seen: int) -> None:
        """Called when a step has changed the weights."""

    def trained(self, step: int, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        """Called after a step's update, with the scores of the documents that `wanted` returned."""

    def step(self, line: Mapping[str, Any]) -> None:
        """Called at the end of a step, with its line of metrics.jsonl."""

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Called after an evaluation, with its line of evaluation.jsonl."""

    def saving(self) -> Sequence[Callable[[], None]]:
        """Called before a checkpoint is written. Write the files that belong to it, and return functions that sync
        these files to the disk. Another thread calls these functions before the checkpoint is complete."""
        return ()

    def saved(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        """Called when a checkpoint is complete and on the disk."""

    def ended(self, ended: str, finished: bool) -> None:
        """Called at the end of a run, with a sentence that says how it ended. `finished` is False if it was stopped."""

    def close(self) -> None:
        """Called last, also after an error."""


class Observers(Observer):
    """The observers of a run as one observer, which calls them in order."""

    def __init__(self, observers: Sequence[Observer] = ()):
        self._all = list(observers)

    def add(self, observer: Observer) -> None:
        self._all.append(observer)

    def of(self, kind: type[_T]) -> _T:
        """Return the only observer of a type."""
        (found,) = [observer for observer in self._all if isinstance(observer, kind)]
        return found

    def started(self) -> None:
        for observer in self._all:
            observer.started()

    def rejected(self, records: Sequence[Rejected]) -> None:
        for observer in self._all:
            observer.rejected(records)

    def rollouts(self, documents: Sequence[Rollout]) -> None:
        for observer in self._all:
            observer.rollouts(documents)

    def wanted(self, plan: StepPlan) -> Collection[int]:
        return frozenset(place for observer in self._all for place in observer.wanted(plan))

    def computing(self, step: int, plan: StepPlan) -> None:
        for observer in self._all:
            observer.computing(step, plan)

    def gradient(self, plan: StepPlan, computed: Computed, norm: float) -> None:
        for observer in self._all:
            observer.gradient(plan, computed, norm)

    def updated(self, step: int, documents_seen: int) -> None:
        for observer in self._all:
            observer.updated(step, documents_seen)

    def trained(self, step: int, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        for observer in self._all:
            observer.trained(step, plan, scores)

    def step(self, line: Mapping[str, Any]) -> None:
        for observer in self._all:
            observer.step(line)

    def evaluated(self, line: Mapping[str, Any]) -> None:
        for observer in self._all:
            observer.evaluated(line)

    def saving(self) -> Sequence[Callable[[], None]]:
        return [put_on_disk for observer in self._all for put_on_disk in observer.saving()]

    def saved(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        for observer in self._all:
            observer.saved(checkpoint, step, documents_seen)

    def ended(self, ended: str, finished: bool) -> None:
        for observer in self._all:
            observer.ended(ended, finished)

    def close(self) -> None:
        """Close all observers, even if one of them raises."""
        with ExitStack() as closing:
            for observer in reversed(self._all):
                closing.callback(observer.close)
