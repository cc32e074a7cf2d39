"""The plans of a run. Each is compared across ranks, and made during the previous step if the source permits it.

A checkpoint is written when the next step's plan has already been taken from the source. So each plan carries the
queue's state right after the plan was taken.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from truestep.process import progress
from truestep.ranks.axes import RankError
from truestep.ranks.group import Ranks
from truestep.rollouts.source import Taken
from truestep.step.plan.agreement import digests_of_plan, disagreement
from truestep.step.plan.queue import PlanQueue
from truestep.types import Rollout, StepPlan


@dataclass(frozen=True)
class Planned:
    """A plan, and the queue's state right after the plan was taken, for the checkpoint of its step."""

    plan: StepPlan | None  # None: the data has ended
    state: Callable[[], dict[str, Any]]  # returns the queue's state right after this plan was taken
    carried: Sequence[Rollout]
    dropped: int
    taken: Taken  # the documents taken from the source for this plan


class PlansAhead:
    """The plans of a queue, each compared across ranks. With `overlap`, a thread makes the next plan during a step."""

    def __init__(self, queue: PlanQueue, ranks: Ranks, *, overlap: bool):
        self._queue, self._ranks = queue, ranks
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="plans") if overlap else None
        self._next: Future[Planned] | None = None

    def next(self) -> Planned:
        if self._worker is None:
            return self._make()
        with progress.waiting_for("the documents of the next step"):
            planned = (self._next or self._worker.submit(self._make)).result()
        self._next = None if planned.plan is None else self._worker.submit(self._make)
        return planned

    def snapshot(self) -> Planned:
        """Return the queue's current state without taking a plan."""
        return Planned(None, self._queue.snapshot(), self._queue.carried, 0, Taken())

    def close(self) -> None:
        """Wait for the plan in progress. Every rank must call this: making a plan communicates between ranks."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)

    def _make(self) -> Planned:
        plan = self._queue.next_plan()
        self._agree(plan)
        queue = self._queue
        return Planned(plan, queue.snapshot(), tuple(queue.carried), len(queue.dropped), queue.taken)

    def _agree(self, plan: StepPlan | None) -> None:
        own = None if plan is None else digests_of_plan(plan, self._ranks.data_rank)
        found = disagreement(self._ranks.gather(own, ahead=True))
        if found is None:
            return
        documents_seen = self._queue.documents_seen if plan is None else plan.documents_seen
        raise RankError(
            f"after document {documents_seen} {found}: they do not see the same data or configuration. The step was "
            "not computed"
        )
