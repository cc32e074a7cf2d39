"""Saving of checkpoints: each rank writes its part in the background, and the first rank completes the checkpoint.

The ranks exchange their progress between steps, in the main thread. So every rank learns of a complete checkpoint after
the same step, and no two threads communicate at once. Only one save is under way at a time.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from truestep.errors import TruestepError
from truestep.model.policy import Policy
from truestep.process.randomness import encode_random
from truestep.ranks.group import Ranks
from truestep.run.checkpoint.background import Task
from truestep.run.checkpoint.staging import Staged, Staging
from truestep.run.checkpoint.store import ModelFiles, Progress, Written, policy_parts
from truestep.weights.finite import some
from truestep.weights.tensor_parts import TensorPart


class SaveError(TruestepError):
    """A checkpoint cannot be written."""


@dataclass(frozen=True)
class SaveRule:
    """The steps after which a run is saved, and the format."""

    every: int = 0  # steps between two saves; 0: save only at the end
    hugging_face_every: int = 0  # every n-th checkpoint is a Hugging Face directory too; 0: none
    grace: float | None = None  # seconds for the last save after a stop signal
    never: bool = False  # write no checkpoint
    in_memory_every: int = 0  # steps between two copies in memory; 0: none

    def due(self, step: int) -> bool:
        return not self.never and self.every > 0 and step % self.every == 0

    def is_hugging_face(self, step: int) -> bool:
        """Tell whether the checkpoint after a step has Hugging Face weights too."""
        nth = self.hugging_face_every
        return nth > 0 and (nth == 1 or self.every == 0 or step % (nth * self.every) == 0)


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint, with the run's step and documents seen at that time."""

    path: Path
    step: int
    documents_seen: int


@dataclass(frozen=True)
class Report:
    """The progress of a rank with the save that is under way."""

    done: bool  # the rank has finished its work of this stage
    error: BaseException | None = None
    late: bool = False  # the rank's deadline has passed
    failed: bool = False  # the checkpoint could not be completed


@dataclass
class _UnderWay:
    progress: Progress
    documents_seen: int
    task: Task | None  # this rank's work of the current stage, if any
    completing: bool = False  # second stage: all parts are written, and the first rank writes the rest


class Store(Protocol):
    """The checkpoints of a run, on the disk or in memory."""

    def final(self, step: int) -> Path: ...

    def complete(self) -> list[Path]: ...

    def latest(self) -> Path | None: ...

    def prepare(self, step: int) -> None: ...

    def write_part(self, step: int, rank: int, staged: Staged, random: dict[str, Any]) -> Written: ...

    def written(self, parts: Sequence[Written]) -> bool:
        """Tell whether these parts make a complete checkpoint. Every rank calls this."""
        ...

    def write_rest(self, progress: Progress, model: ModelFiles, parts: Sequence[Written]) -> Path | None:
        """Complete the checkpoint; return None if that failed."""
        ...

    def stands(self, step: int) -> None:
        """Called on every rank when a checkpoint is complete."""
        ...

    def not_written(self, error: Exception) -> Written:
        """Handle a part that was not written: raise its error, or return a `Written` if the run can go on without."""
        ...


class Saves:
    """The saves of a run, one after another."""

    def __init__(self, store: Store, ranks: Ranks, staging: Staging | None = None):
        self._store, self._ranks = store, ranks
        self._staging = staging or Staging()
        self._under_way: _UnderWay | None = None
        self._staged: Staged | None = None  # the parts of the last save, even if the save was given up
        self._model: ModelFiles | None = None  # on the first rank only; made once for all saves

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    def prepare(self, policy: Policy, state: Callable[[], Iterable[TensorPart]]) -> None:
        """Allocate the staging buffer, in a thread, and collect the model's files, before the first save needs them."""
        if not self._staging.has_room:
            self._staging.make_room_beside([*policy_parts(policy), *state()])
        if self._ranks.first:
            self._model = self._files(policy)

    def _files(self, policy: Policy) -> ModelFiles:
        return self._model or ModelFiles.of(policy)

    def begin(
        self,
        policy: Policy,
        state: Iterable[TensorPart],
        progress: Progress,
        documents_seen: int,
        hugging_face: bool = False,
        sync: Callable[[], None] = lambda: None,
    ) -> Complete | None:
        """Begin to copy and write this rank's part of a checkpoint, or return the checkpoint if it exists already. With
        `hugging_face`, the weights are also written in Hugging Face format. The writing thread calls `sync`, which puts
        the run's other files on the disk, before it writes the part. Every rank calls this."""
        assert self._under_way is None, "one save at a time"
        ranks, final = self._ranks, self._store.final(progress.step)
        if ranks.share(lambda: final in self._store.complete()):
            sync()
            return Complete(final, progress.step, documents_seen)
        ranks.share(lambda: self._store.prepare(progress.step))
        if ranks.first:
            self._model = replace(self._files(policy), with_weights=hugging_face)
        staged = self._staging.stage([*policy_parts(policy), *state])
        random = encode_random()

        def write() -> Written:
            try:
                return copy_and_write()
            except (OSError, MemoryError, RuntimeError) as error:
                return self._store.not_written(error)

        def copy_and_write() -> Written:
            staged.copy()
            if staged.not_finite:
                latest = self._store.latest()
                begin = "No checkpoint is written yet: begin the run again"
                if latest is not None:
                    begin = f"The last checkpoint is {latest}; begin again from there"
                raise SaveError(
                    f"step {progress.step} is not saved: its checkpoint would have {some(staged.not_finite)} with "
                    f"values that are not finite. {begin} with a lower optimizer.learning_rate"
                )
            sync()
            return self._store.write_part(progress.step, ranks.rank, staged, random)

        task, self._staged = Task(write), staged
        self._under_way = _UnderWay(progress, documents_seen, task)
        return None

    def before_update(self) -> None:
        """Wait until the weights and states of the save are copied, before an update changes them."""
        if self._staged is not None:
            self._staged.before_update()

    def report(self, late: bool = False) -> Report | None:
        """Return this rank's progress with the save. Every rank passes the reports of all ranks to `hear`."""
        if self._under_way is None:
            return None
        task = self._under_way.task
        if task is None:
            return Report(True, None, late)
        failed = self._under_way.completing and task.ended and task.error is None and task.result is None
        return Report(task.ended, task.error if task.ended else None, late, failed)

    def hear(self, reports: Iterable[Report | None]) -> Complete | None:
        """Start the next stage of the save once all ranks have finished this one. Return the checkpoint if it is now
        complete. An error of one rank is raised on all ranks."""
        under_way = self._under_way
        told = [report for report in reports if report is not None]
        if under_way is None or not told:
            return None
        error = next((report.error for report in told if report.error is not None), None)
        if error is not None:
            self._end()
            raise error
        if not all(report.done for report in told):
            return None
        if under_way.completing:
            self._end()
            if any(report.failed for report in told):
                return None
            self._staging.completed()
            progress = under_way.progress
            self._store.stands(progress.step)
            return Complete(self._store.final(progress.step), progress.step, under_way.documents_seen)
        self._complete(under_way)
        return None

    def _complete(self, under_way: _UnderWay) -> None:
        """Start the second stage: the first rank writes the files that are not parts of a rank."""
        assert under_way.task is not None
        parts: list[Written] = self._ranks.gather(under_way.task.result)
        if not self._store.written(parts):
            self._end()
            return
        under_way.completing = True
        progress, model = under_way.progress, self._model
        under_way.task = None if model is None else Task(lambda: self._store.write_rest(progress, model, parts))

    def finish(self, deadline: float | None = None) -> Complete | None:
        """Wait until the save under way is complete. Give the save up if `deadline`, a time of `time.monotonic`, passes
        first on any rank. Every rank calls this."""
        while self._under_way is not None:
            if self._under_way.task is not None:
                self._under_way.task.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            late = deadline is not None and time.monotonic() > deadline
            reports = self._ranks.gather(self.report(late))
            complete = self.hear(reports)
            if complete is not None:
                return complete
            if any(report is not None and report.late for report in reports):
                self._end()
        return None

    def _end(self) -> None:
        self._under_way = None

    def close(self) -> None:
        """Wait for the threads that allocate and copy, because a process that ends while they run torch code aborts."""
        try:
            self._staging.close()
        finally:
            if self._staged is not None:
                self._staged.give_up()
