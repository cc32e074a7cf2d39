"""The loss of held-out documents, which a supervised run is judged by: the mean over all of their labels."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truestep.step.plan import StepRule, plan_exactly
from truestep.step.runner import StepRunner
from truestep.types import Rollout


@dataclass(frozen=True)
class HeldOutLoss:
    runner: StepRunner  # of the run's loss without optional terms, over labels
    rule: StepRule
    documents: Sequence[Rollout]
    num_rejected: int

    def run(self, step: int, documents_seen: int) -> dict[str, Any]:
        """Evaluate the policy and give one line of evaluation.jsonl. Every rank has its part of the documents."""
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
