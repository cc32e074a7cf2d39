"""Annotators add fields to the documents of a plan before its passes.

To add one: derive from `Annotator`, and name it in the list of `make_annotators` (`run/assemble/step.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from truestep.metrics.spent import StepTimes
from truestep.step.before.chosen import Chooser
from truestep.step.before.scoring import Field, score_documents, with_logprobs
from truestep.step.compute.runner import StepRunner
from truestep.types import DocumentScore, Rollout, StepPlan


class Annotator:
    """A base for annotators. Every rank has them, and calls them in the same order."""

    fields: tuple[Field, ...] = ()  # fields added once for all updates on the same documents; kept in checkpoints
    part: str | None = None  # name under which its time is reported in the step's times
    needs_scores = False  # `computed` needs the scores of all documents

    def annotate(self, plan: StepPlan) -> StepPlan:
        """Return the plan with added fields. Called before each update; fields added for the first update are kept."""
        return plan

    def computed(self, plan: StepPlan, scores: Sequence[DocumentScore]) -> StepPlan:
        """Return the plan with fields from the first update's passes, for further updates on its documents."""
        return plan


class ReferenceLogprobs(Annotator):
    """The log-probs of a reference: one forward pass of frozen weights, with the step's packing and layout."""

    fields = ("reference_logprobs",)
    part = "reference"

    def __init__(self, runner: StepRunner, at_use: Callable[[], AbstractContextManager[None]] = nullcontext):
        """`at_use` makes the weights of `runner` available."""
        self.runner, self._at_use = runner, at_use

    def annotate(self, plan: StepPlan) -> StepPlan:
        # After a restart, a checkpoint's documents already have the field.
        if all(document.reference_logprobs is not None for document in plan.documents):
            return plan
        with self._at_use():
            scores = score_documents(self.runner, plan)
        self.runner.stopwatch.drain()  # nobody reads these times
        return replace(plan, documents=with_logprobs(plan.documents, "reference_logprobs", scores))


class OwnLogprobs(Annotator):
    """The trainer's own log-probs before the first update, for later updates on the same documents. They cost nothing,
    because the first update's forward pass computes them."""

    fields = ("recomputed_logprobs",)
    needs_scores = True

    def computed(self, plan: StepPlan, scores: Sequence[DocumentScore]) -> StepPlan:
        return replace(plan, documents=with_logprobs(plan.documents, "recomputed_logprobs", scores))


class ChosenLabels(Annotator):
    """The labels that the loss chooses, for each update."""

    def __init__(self, chooser: Chooser):
        self._chooser = chooser

    def annotate(self, plan: StepPlan) -> StepPlan:
        return replace(plan, documents=self._chooser.choose(plan.documents, plan.documents_seen))


class Annotators:
    """The annotators of a run, and the annotated documents of the current step."""

    def __init__(self, annotators: Sequence[Annotator] = ()):
        self.all = list(annotators)
        self._documents: tuple[Rollout, ...] = ()

    @property
    def needs_scores(self) -> bool:
        return any(annotator.needs_scores for annotator in self.all)

    def fill(self, field: str) -> bool:
        """Tell whether an annotator adds this field."""
        return any(field in annotator.fields for annotator in self.all)

    def annotate(self, plan: StepPlan, times: StepTimes | None = None) -> StepPlan:
        """Let each annotator add its fields to the plan. Its time is added to `times`."""
        if plan.repeated and self._documents:
            plan = replace(plan, documents=self._documents)
        for annotator in self.all:
            with _timed(times, annotator.part):
                plan = annotator.annotate(plan)
        self._documents = tuple(plan.documents)
        return plan

    def computed(self, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        """Give the annotators the results of the first update's passes on its documents."""
        if plan.repeated:
            return
        for annotator in self.all:
            plan = annotator.computed(plan, scores)
        self._documents = tuple(plan.documents)

    def carried(self, documents: Sequence[Rollout]) -> Sequence[Rollout]:
        """Add the fields that were computed once to documents in a checkpoint, for further updates on them."""
        if len(documents) != len(self._documents):
            return documents
        names = [name for annotator in self.all for name in annotator.fields]
        return [
            replace(document, **{name: getattr(known, name) for name in names})
            for document, known in zip(documents, self._documents, strict=True)
        ]


def _timed(times: StepTimes | None, part: str | None) -> AbstractContextManager[None]:
    return nullcontext() if times is None or part is None else times.measure(part)
