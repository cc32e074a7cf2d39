"""The check of a sampler's tokens before an update on them, and of its answers in an evaluation.

Tokens drawn by the current weights are compared in the step's own first pass. If completions are trained on by later
weights, a share of them is scored as soon as they arrive, while the weights that drew them are current. The result is
judged together with the step that trains on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from truestep.errors import TruestepError
from truestep.losses.agreement import COLUMN
from truestep.metrics.spent import Stopwatch
from truestep.step.before.agreement import Fault, Judge, at_labels
from truestep.step.before.causes import explain
from truestep.step.compute.runner import Accumulated, StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.text import discard
from truestep.types import Rollout, StepPlan

_MOST_EXPLAINED = 64  # the largest number of documents scored again to explain a fault
_MOST_ANSWERS = 64  # the largest number of scored answers of an evaluation
_EVERY = 8  # with sampling in process, the first 8 steps and every 8th step are compared


class SamplerError(TruestepError):
    """Raised if answers in an evaluation are not the policy's."""


@dataclass(frozen=True)
class _Held:
    """The comparison of a completion with the weights that drew it."""

    version: int
    row: np.ndarray
    logprobs: np.ndarray


@dataclass
class SamplerCheck:
    """Compares samplers' log-probs with the policy's. Every rank has one, and all get the same verdict."""

    runner: StepRunner
    rule: StepRule
    judge: Judge
    max_staleness: int = 0
    # returns a share of the completions that arrived since the last call
    arrived: Callable[[], Sequence[Rollout]] | None = None
    warn: Callable[[str], None] | None = None  # called once with a fault's description; None: a fault ends the run
    _held: dict[str, _Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = replace(
            self.runner,
            compares=self.judge.tolerance,
            metrics_level=None,
            custom_metrics={},
            keep_scores=True,
            exact=False,
            # a separate one, so that the step's own times do not change
            stopwatch=Stopwatch(self.runner.policy.device),
        )

    def due(self, step: int) -> bool:
        """Tell whether a step's documents are compared. With servers, all steps are compared. With sampling in process,
        some steps suffice, because a fault of the engine is in all of them; such a fault only causes a warning."""
        return self.warn is None or step <= _EVERY or step % _EVERY == 0

    def before_update(self, plan: StepPlan, accumulated: Accumulated) -> str | None:
        """Compare a step's documents with the policy, and describe the fault. `accumulated`: the results of the step's
        own pass."""
        if self.arrived is not None:
            self._hold(self.arrived(), plan.documents_seen)
        # Repeated documents were compared before the first update on them.
        if plan.repeated or (compared := accumulated.compared) is None:
            return None
        table = compared.copy() if self._held else compared
        for place, document in enumerate(plan.documents if self._held else ()):
            if held := self._held.get(document.id):
                table[place] += held.row
        fault = self.judge.find(plan.documents, table)
        return None if fault is None else self._said(fault, plan.documents, plan.documents_seen)

    def answers(self, documents: Sequence[Rollout], documents_seen: int) -> None:
        """Compare answers of an evaluation, drawn by the current weights. Raise an error if they are not the
        policy's."""
        if not documents:
            return
        some = documents[:: -(-len(documents) // _MOST_ANSWERS)]
        compared = self._score(some, documents_seen).compared
        assert compared is not None
        fault = Judge(self.judge.tolerance, self.judge.vocabulary_size).find(some, compared)
        text = None if fault is None else self._said(fault, some, documents_seen)
        if text is not None:
            raise SamplerError(f"evaluation: {text}")

    def _hold(self, arrived: Sequence[Rollout], documents_seen: int) -> None:
        """Score completions that the current weights drew, for the step that trains on them. That step takes a
        completion only if the server had these weights."""
        new = [rollout for rollout in arrived if (at_labels(rollout, "model_version") == documents_seen).any()]
        if new:
            scored = self._score(new, documents_seen)
            assert scored.compared is not None
            for rollout, row, score in zip(new, scored.compared, scored.scores, strict=True):
                row[COLUMN["older"] :] = 0.0  # keep only the sums for tokens of the current weights
                self._held[rollout.id] = _Held(documents_seen, row, score.logprobs)
        oldest = documents_seen - self.max_staleness
        self._held = {name: held for name, held in self._held.items() if held.version >= oldest}

    def _score(self, documents: Sequence[Rollout], documents_seen: int) -> Accumulated:
        plain = [replace(document, advantages=None, difference=None) for document in documents]
        scored = self.runner.accumulate(plan_exactly(plain, self.rule, documents_seen), backward=False)
        self.runner.stopwatch.drain()  # nobody reads these times
        return scored

    def _said(self, fault: Fault, documents: Sequence[Rollout], documents_seen: int) -> str | None:
        if fault.of_draws:
            named = [documents[place] for place in fault.places]
            text = explain(fault, named, [], self.judge.tolerance)
        else:
            accused = [documents[place] for place in fault.places[:_MOST_EXPLAINED]]
            accused = [document for document in accused if document.num_labels]
            scores = [score.logprobs for score in self._score(accused, documents_seen).scores]
            known = [self._held.get(document.id) for document in accused]
            then = [score if held is None else held.logprobs for score, held in zip(scores, known, strict=True)]
            text = explain(fault, accused, then, self.judge.tolerance)
        if self.warn is None:
            return text
        self.warn(f"warning: {text}")
        self.warn = discard
        return None
