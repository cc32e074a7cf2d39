"""Log-probs of a plan's documents from forward passes only, and documents with such log-probs as a field."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from truestep.step.compute.runner import StepRunner
from truestep.types import DocumentScore, Rollout, StepPlan

Field = Literal["recomputed_logprobs", "reference_logprobs"]


def score_documents(runner: StepRunner, plan: StepPlan) -> tuple[DocumentScore, ...]:
    """Run only the forward passes of a plan. Return the scores of all documents, on every rank."""
    scoring = replace(runner, keep_scores=True, metrics_level=None, custom_metrics={})
    return scoring.accumulate(plan, backward=False).scores


def with_logprobs(documents: Sequence[Rollout], name: Field, scores: Sequence[DocumentScore]) -> tuple[Rollout, ...]:
    """Set a field of each document to the log-probs of its labels."""

    def at_labels(document: Rollout, logprobs: np.ndarray) -> np.ndarray:
        values = np.zeros(document.num_tokens, np.float32)
        values[document.loss_mask] = logprobs
        return values

    pairs = zip(documents, scores, strict=True)
    values = ((document, {name: at_labels(document, score.logprobs)}) for document, score in pairs)
    return tuple(replace(document, **value) for document, value in values)  # type: ignore[arg-type]


def by_record(documents: Sequence[Rollout], scores: Sequence[DocumentScore]) -> Iterator[tuple[Rollout, DocumentScore]]:
    """Yield each record with its part of its document's score."""
    for document, score in zip(documents, scores, strict=True):
        start = 0
        for sequence in document.sequences:
            part = slice(start, start + sequence.num_labels)
            yield sequence, DocumentScore(sequence.id, score.logprobs[part], score.entropy[part])
            start = part.stop
