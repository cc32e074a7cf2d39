"""Saves by all ranks at once: each writes its part in the background, and the first one completes the checkpoint.

How far they have come, the ranks tell each other between steps: so every rank learns of a complete checkpoint after the
same step, and no message is sent while another thread sends one. One save is under way at a time.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from truestep.errors import TruestepError
from truestep.model.policy import Policy
from truestep.process.randomness import encode_random
from truestep.ranks.group import Ranks
from truestep.run.checkpoint.background import Task
from truestep.run.checkpoint.staging import Staged, Staging
from truestep.run.checkpoint.store import CheckpointStore, ModelFiles, Progress, Written, policy_parts
from truestep.weights.finite import some
from truestep.weights.tensor_parts import TensorPart


class SaveError(TruestepError):
    """The reason why a checkpoint is not written."""


@dataclass(frozen=True)
class SaveRule:
    """When a run is saved, and how."""

    every: int = 0  # steps; 0: only at the end
    hugging_face_every: int = 0  # checkpoints; 0: none of them
    grace: float | None = None  # seconds in which a run that a signal stops is saved
    never: bool = False  # the run leaves no checkpoint

    def due(self, step: int) -> bool:
        return not self.never and self.every > 0 and step % self.every == 0

    def is_hugging_face(self, step: int) -> bool:
        """Tell whether the checkpoint after a step is a Hugging Face directory too."""
        nth = self.hugging_face_every
        return nth > 0 and (nth == 1 or self.every == 0 or step % (nth * self.every) == 0)


@dataclass(frozen=True)
class Complete:
    """A checkpoint that is complete, and where the run stood then."""

    path: Path
    step: int
    documents_seen: int


@dataclass(frozen=True)
class Report:
    """How far a rank has come with the save that is under way."""

    done: bool  # with what it has to do at this stage
    error: BaseException | None = None
    late: bool = False  # it may wait no longer


@dataclass
class _UnderWay:
    progress: Progress
    documents_seen: int
    task: Task | None  # of this stage, if this rank has one
    completing: bool = False  # all parts are written


class Saves:
    """The saves of a run, one after another."""

    def __init__(self, store: CheckpointStore, ranks: Ranks):
        self._store, self._ranks = store, ranks
        self._staging = Staging()
        self._under_way: _UnderWay | None = None
        self._staged: Staged | None = None  # the last one, also of a save that was given up
        self._model: ModelFiles | None = None  # on the first rank; the same for all saves

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    def prepare(self, policy: Policy, state: Callable[[], Iterable[TensorPart]]) -> None:
        """Make what all saves need, so that the first one need not wait for it. A thread makes the memory that parts
        are copied to."""
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
        """Begin to copy and write this rank's part of a checkpoint; give the checkpoint if it is there already. With
        `hugging_face` its weights are written as a Hugging Face directory too. `sync` puts on the disk what the
        checkpoint counts on; the thread that writes calls it before that. Every rank calls this."""
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
            staged.copy()
            if staged.not_finite:
                raise SaveError(
                    f"step {progress.step} is not saved: its checkpoint would have {some(staged.not_finite)} with "
                    f"values that are not finite. The last checkpoint is {self._store.latest() or 'not written yet'}"
                )
            sync()
            return self._store.write_part(progress.step, ranks.rank, staged, random)

        task, self._staged = Task(write), staged
        self._under_way = _UnderWay(progress, documents_seen, task)
        return None

    def before_update(self) -> None:
        """See to it that what is saved is copied before it changes."""
        if self._staged is not None:
            self._staged.before_update()

    def report(self, late: bool = False) -> Report | None:
        """Tell how far this rank has come. Every rank gives all reports to `hear`."""
        if self._under_way is None:
            return None
        task = self._under_way.task
        if task is None:
            return Report(True, None, late)
        return Report(task.ended, task.error if task.ended else None, late)

    def hear(self, reports: Iterable[Report | None]) -> Complete | None:
        """Go on with the save as far as all ranks have come. Give the checkpoint if it is complete now. What one rank
        failed with, all raise."""
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
            progress = under_way.progress
            return Complete(self._store.final(progress.step), progress.step, under_way.documents_seen)
        self._complete(under_way)
        return None

    def _complete(self, under_way: _UnderWay) -> None:
        """Have the first rank write the rest, now that all parts are written."""
        assert under_way.task is not None
        parts: list[Written] = self._ranks.gather(under_way.task.result)
        under_way.completing = True
        progress, model = under_way.progress, self._model
        under_way.task = None if model is None else Task(lambda: self._store.write_rest(progress, model, parts))

    def finish(self, deadline: float | None = None) -> Complete | None:
        """Wait until the save under way is complete, but no longer than `deadline`, by the clock `time.monotonic`, on
        any rank: then it is given up. Every rank calls this."""
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
        """Wait for threads that are in torch's own code: a process that ends meanwhile is aborted by them."""
        try:
            self._staging.close()
        finally:
            if self._staged is not None:
                self._staged.give_up()
