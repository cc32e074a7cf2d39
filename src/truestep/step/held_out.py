"""The loss of held-out documents, for judging a supervised run: the mean over all of their labels."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from truestep.rollouts.source import Interrupted, never
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.types import Rollout


@dataclass(frozen=True)
class HeldOutLoss:
    runner: StepRunner  # computes the run's loss without optional terms, averaged over labels
    rule: StepRule
    documents: Sequence[Rollout]
    num_rejected: int

    def run(self, step: int, documents_seen: int, asked_to_stop: Callable[[], bool] = never) -> dict[str, Any]:
        """Evaluate the policy. Return one line of evaluation.jsonl. Raise `Interrupted` if the run was asked to
        stop."""
        # all ranks decide together, because they compute together
        if any(self.runner.policy.weights.ranks.gather(asked_to_stop())):
            raise Interrupted
        start = time.perf_counter()
        plan = plan_exactly(self.documents, self.rule, documents_seen)
        line = self.runner.accumulate(plan, backward=False).line()
        return {
            "step": step,
            "documents_seen": documents_seen,
            "num_documents": line["num_documents"],
            "num_labels": line["num_labels"],
            "num_rejected": self.num_rejected,
            "loss": line["loss"],
            "seconds": time.perf_counter() - start,
        }

    def close(self) -> None:
        """Do nothing: there is no process to stop."""
