"""Each document's contribution to the gradient's norm.

A norm is no sum over documents. But the gradient is one, so the norm is the sum of the documents' gradients along the
whole gradient's direction: |g| = Σ_d <g_d, g> / |g|. That is a document's part here, and a label's. A document that
makes a norm jump has nearly all of it, and two that do share it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from truestep.ranks.axes import WEIGHT_PARTS
from truestep.rollouts.fields import Field
from truestep.step.compute.runner import StepRunner
from truestep.step.update.blame import only
from truestep.step.update.gradient_clipping import gradient_norm
from truestep.tools.replay.parts import KEPT, of_kept_labels
from truestep.types import StepPlan
from truestep.weights.protocol import Weights

_SLICE = 2**22  # elements of a product that are computed at a time


class Direction:
    """The gradient of a whole step, kept on the host, and its products with gradients of parts."""

    def __init__(self, weights: Weights, norm: float):
        self._weights, self.norm = weights, norm
        self._kept = {name: gradient.detach().to("cpu", copy=True) for name, gradient in weights.gradients.items()}

    @torch.no_grad()
    def part(self) -> float:
        """Return the contribution of the gradient in the buffers to the norm. Every rank calls this."""
        weights = self._weights
        total = torch.zeros((), dtype=torch.float64, device=weights.device)
        for name, gradient in weights.gradients.items():
            if weights.pieces[name].counted_on(weights.ranks):
                pairs = zip(self._kept[name].reshape(-1).split(_SLICE), gradient.reshape(-1).split(_SLICE), strict=True)
                for whole, own in pairs:
                    total += (whole.to(weights.device).double() * own.double()).sum()
        for group in WEIGHT_PARTS:
            weights.ranks.sum_over(group, total)
        return float(total) / self.norm if self.norm else 0.0

    @torch.no_grad()
    def restore(self) -> None:
        """Put the whole gradient back into the buffers."""
        for name, gradient in self._weights.gradients.items():
            gradient.copy_(self._kept[name])


@dataclass
class GradientParts:
    """Replays of parts of a step, with denominators and advantages of the whole step. Every rank calls its methods."""

    runner: StepRunner
    plan: StepPlan
    direction: Direction

    def __post_init__(self) -> None:
        self.runner = replace(self.runner, metrics_level=None, keep_scores=False, compares=None)

    def order(self) -> list[int]:
        """Return the documents' indices in micro-batch order, so that halves are whole micro-batches."""
        plan = self.plan
        packed = (plan.document_of[place] for members in plan.micro_batches for place in members)
        return list(dict.fromkeys(packed))

    def of_documents(self, some: Sequence[int]) -> float:
        """Return the contribution of some documents to the norm."""
        self.runner.accumulate(only(self.plan, some))
        return self.direction.part()

    def norm_without(self, some: Sequence[int]) -> float:
        """Return the norm of the gradient of all documents but these."""
        left_out = set(some)
        self.runner.accumulate(only(self.plan, [number for number in self.order() if number not in left_out]))
        return gradient_norm(self.runner.policy.weights)

    def of_labels(self, number: int, places: Sequence[int]) -> float:
        """Return the contribution of some labels of a document. `places`: their indices among its tokens."""
        plan = only(self.plan, [number])
        (document,) = plan.documents
        kept = np.zeros(document.num_tokens, np.bool_)
        kept[list(places)] = True
        marked = replace(document, fields={**document.fields, KEPT: kept & document.loss_mask})
        runner = replace(
            self.runner,
            objective=of_kept_labels(self.runner.objective),
            fields=(*self.runner.fields, Field(KEPT, "label", np.bool_, has=False)),
        )
        runner.accumulate(replace(plan, documents=(marked,)))
        return self.direction.part()
