"""What is known of a step's documents before the first update on them: computed once, for all updates on them.

The trainer's own log-probs cost nothing beside the step: the forward pass of the first update is of the weights before
it. A reference's are one forward pass, of weights that are not trained, packed and cut as the step is.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import numpy as np

from truestep.step.chosen import Chooser
from truestep.step.runner import StepRunner
from truestep.types import DocumentScore, Rollout, StepPlan

Field = Literal["recomputed_logprobs", "reference_logprobs"]


def score_documents(runner: StepRunner, plan: StepPlan) -> tuple[DocumentScore, ...]:
    """Run the forward passes of a plan, without metrics or gradients; on every rank, all documents' scores."""
    scoring = replace(runner, keep_scores=True, metrics_level=None, custom_metrics={})
    return scoring.accumulate(plan, backward=False).scores


def with_logprobs(documents: Sequence[Rollout], name: Field, scores: Sequence[DocumentScore]) -> tuple[Rollout, ...]:
    """Give each document the log-probs of its labels under a field's name."""

    def at_labels(document: Rollout, logprobs: np.ndarray) -> np.ndarray:
        values = np.zeros(document.num_tokens, np.float32)
        values[document.loss_mask] = logprobs
        return values

    pairs = zip(documents, scores, strict=True)
    values = ((document, {name: at_labels(document, score.logprobs)}) for document, score in pairs)
    return tuple(replace(document, **value) for document, value in values)  # type: ignore[arg-type]


class BeforeUpdates:
    """The documents of the step in hand, with what was computed before the first update on them."""

    def __init__(
        self,
        reference: StepRunner | None = None,
        *,
        keeps_own: bool = False,
        chooser: Chooser | None = None,
        at_use: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """`reference` is its runner, whose weights are there inside `at_use`. `keeps_own`: further updates need the
        trainer's log-probs. `chooser` chooses labels, anew at every update."""
        self._reference, self._at_use = reference, at_use
        self.keeps_own = keeps_own
        self.has_reference = reference is not None
        self._chooser = chooser
        self._documents: tuple[Rollout, ...] = ()

    def complete(self, plan: StepPlan) -> StepPlan:
        """Give a plan's documents what is known of them."""
        if not (plan.repeated and self._documents):
            self._documents = self._referred(plan)
        if self._chooser is None:
            return replace(plan, documents=self._documents)
        return replace(plan, documents=self._chooser.choose(self._documents, plan.documents_seen))

    def _referred(self, plan: StepPlan) -> tuple[Rollout, ...]:
        """Give a plan's documents the log-probs of the reference, if there is one."""
        documents = plan.documents
        # After a restart, documents come back with what was known of them.
        if self._reference is not None and not all(known.reference_logprobs is not None for known in documents):
            with self._at_use():
                scores = score_documents(self._reference, plan)
            return with_logprobs(documents, "reference_logprobs", scores)
        return documents

    def computed(self, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        """Keep the log-probs that the first update's own forward passes gave."""
        if self.keeps_own and not plan.repeated:
            self._documents = with_logprobs(plan.documents, "recomputed_logprobs", scores)

    def carried(self, documents: Sequence[Rollout]) -> Sequence[Rollout]:
        """Give documents that a checkpoint carries to further updates on them what is known of them."""
        if len(documents) != len(self._documents):
            return documents
        names: tuple[Field, ...] = ("recomputed_logprobs", "reference_logprobs")
        return [
            replace(document, **{name: getattr(known, name) for name in names})
            for document, known in zip(documents, self._documents, strict=True)
        ]
