"""Observers: what is told how a run goes. They change nothing of what is computed.

A user's callbacks and sinks, the rollouts that are kept, and the publication of new weights are observers. To add
another: derive from `Observer`, and name it in the list that `run/assemble/observers.py` makes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from truestep.types import DocumentScore, Rejected, Rollout, StepPlan

_T = TypeVar("_T")


class Computed(Protocol):
    """What was computed of a step: its metrics as a line, and the scores that observers wanted."""

    @property
    def scores(self) -> tuple[DocumentScore, ...]: ...

    def line(self) -> dict[str, Any]: ...


class Observer:
    """A base for observers; a method that is not overridden does nothing. Every rank has the observers of a run, and
    calls them in the same order."""

    def started(self) -> None:
        """Called before the first step of this start, once what a checkpoint holds is back in place."""

    def rejected(self, records: Sequence[Rejected]) -> None:
        """Called with records that were refused, as soon as the run knows of them."""

    def rollouts(self, documents: Sequence[Rollout]) -> None:
        """Called with the documents of a step, in their order, before the step is computed."""

    def wanted(self, plan: StepPlan) -> Collection[int]:
        """Choose the documents of a plan, by their places, whose scores `trained` needs; the same on every rank."""
        return ()

    def gradient(self, plan: StepPlan, computed: Computed, norm: float) -> None:
        """Called with a step's gradient in its buffers, before it is clipped and used."""

    def updated(self, step: int, documents_seen: int) -> None:
        """Called when a step has changed the weights."""

    def trained(self, step: int, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        """Called with the documents of a step after its update, and with the scores of those that were wanted."""

    def step(self, line: Mapping[str, Any]) -> None:
        """Called with a step's line of metrics.jsonl, the last thing of a step."""

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Called after an evaluation, with its line of evaluation.jsonl."""

    def saving(self) -> Sequence[Callable[[], None]]:
        """Called before a checkpoint is written. Write what it counts on, and give what puts that on the disk; any
        thread may call this before the checkpoint is complete."""
        return ()

    def saved(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        """Called when a checkpoint is complete: it survives any kill from now on."""

    def ended(self, ended: str, finished: bool) -> None:
        """Called at the end of a run, with the sentence that says how it ended; not `finished`: it was stopped."""

    def close(self) -> None:
        """Called last, also where an error ended the run."""


class Observers(Observer):
    """The observers of a run, called one after another."""

    def __init__(self, observers: Sequence[Observer] = ()):
        self._all = list(observers)

    def add(self, observer: Observer) -> None:
        self._all.append(observer)

    def of(self, kind: type[_T]) -> _T:
        """Find the one observer of a kind."""
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
        """Close all of them, also those behind one that fails."""
        with ExitStack() as closing:
            for observer in reversed(self._all):
                closing.callback(observer.close)
