"""The queue of plans made from a source. A plan depends only on the state of the queue and of its source."""

from collections.abc import Callable, Sequence
from typing import Any

from truestep.rollouts.source import PeekableSource, Source, SourceError, StepSource, Taken
from truestep.step.plan.plan import StepRule, count_packed, lengths_of, may_end, plan_exactly, plan_packed
from truestep.step.plan.trees import Spread
from truestep.types import Rollout, StepPlan


class PlanQueue:
    """A sequence of plans. Documents are taken from the source once and used for `updates_per_batch` plans."""

    def __init__(
        self,
        source: Source,
        rule: StepRule,
        *,
        updates_per_batch: int = 1,
        drop_last: bool = False,
        spread: Spread | None = None,
    ):
        self._source, self._rule, self._spread = source, rule, spread
        self._updates_per_batch, self._drop_last = updates_per_batch, drop_last
        self._repeats_left = 0
        self._documents: list[Rollout] = []  # the documents of the plan that is being repeated
        self.documents_seen = 0
        self.dropped: list[Rollout] = []
        self.taken = Taken()  # taken from the source for the last plan; no documents if the plan is a repeat

    def next_plan(self) -> StepPlan | None:
        """Make the next step's plan; None at the end of the data."""
        repeated = self._repeats_left > 0
        if repeated:
            self._repeats_left -= 1
            self.taken = self._source.aside()
        else:
            taken = self._take()
            if taken is None:
                self.taken = self._source.aside()
                return None
            self.taken = taken
            self._documents = list(taken.documents)
            self._repeats_left = self._updates_per_batch - 1
        plan = self._plan(repeated)
        self.documents_seen = plan.documents_seen_after
        return plan

    def _plan(self, repeated: bool) -> StepPlan:
        if self._rule.exact:
            return plan_exactly(self._documents, self._rule, self.documents_seen, self._spread, repeated)
        return plan_packed(self._documents, self._rule, self.documents_seen, repeated)

    def _take(self) -> Taken | None:
        if isinstance(self._source, StepSource):
            return self._source.take_step()
        return self._take_exact() if self._rule.exact else self._take_packed()

    def _take_exact(self) -> Taken | None:
        wanted = self._rule.docs_per_step
        if isinstance(self._source, PeekableSource):
            waiting = self._source.peek(wanted)
            if len(waiting) < wanted and self._ends_before(waiting):
                return None
        taken = self._source.take(wanted, self.documents_seen)
        if not taken.documents:
            raise SourceError("the source has no end and made no document for this step: all were rejected")
        return taken

    def _take_packed(self) -> Taken | None:
        source, wanted = self._source, self._rule.docs_per_step + 1
        assert isinstance(source, PeekableSource), "with a sampler, the configuration allows only exact steps"
        while True:
            waiting = source.peek(wanted)
            count, micro_batches, complete = count_packed([lengths_of(document) for document in waiting], self._rule)
            if complete:
                break
            if len(waiting) < wanted:  # end of data
                complete = count > 0 and may_end(micro_batches, count, self._rule)
                break
            # Peek a few at a time: the source may send more documents only after this step's weights are published.
            wanted += 1 if self._rule.docs_per_step else 1 + wanted // 8
        # Documents that are left out stay in the source: they belong to the next step if the files grow.
        if not complete and self._ends_before(waiting):
            return None
        return source.take(count, self.documents_seen)

    def _ends_before(self, documents: Sequence[Rollout]) -> bool:
        """Tell whether the data ends here, with too few documents for another step. Keep a list of dropped
        documents."""
        if documents and self._drop_last:
            self.dropped = list(documents)
        return not documents or self._drop_last

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Capture the queue's position, and return a function that builds its state, as sources do."""
        own = {"documents_seen": self.documents_seen, "repeats_left": self._repeats_left}
        of_source = self._source.snapshot()
        return lambda: own | {"source": of_source()}

    @property
    def carried(self) -> list[Rollout]:
        """The documents of a plan that will be repeated; they are kept in checkpoints."""
        return self._documents if self._repeats_left else []

    def restore(self, state: dict[str, Any], carried: list[Rollout]) -> None:
        self.documents_seen = state["documents_seen"]
        self._repeats_left = state["repeats_left"]
        self._documents = carried
        self._source.restore(state["source"])
