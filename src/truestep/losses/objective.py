"""The whole objective: a loss of labels, optional terms, and one denominator for all of them.

T: labels of a micro-batch; N, D: labels and documents of the whole step.
"""

from dataclasses import dataclass

import torch

from truestep.losses.label_losses import LabelLoss
from truestep.losses.labels import Labels
from truestep.types import Coefficients, StepTotals


@dataclass(frozen=True)
class Denominator:
    """The denominator that `loss.normalize_by` names."""

    normalize_by: str
    max_labels: int | None = None

    def label_weights(self, num_labels: torch.Tensor, totals: StepTotals) -> torch.Tensor:  # [T], [T]
        """Compute one over the denominator for each label, given the number of labels of its document."""
        documents, labels = max(totals.num_documents, 1), max(totals.num_labels, 1)
        match self.normalize_by:
            case "labels":
                denominator = torch.full_like(num_labels, labels)
            case "documents":
                denominator = torch.full_like(num_labels, documents)
            case "document_means":
                denominator = num_labels * documents
            case "constant":
                assert self.max_labels is not None
                denominator = torch.full_like(num_labels, documents * self.max_labels)
            case other:
                raise ValueError(f"unknown normalize_by: {other}")
        return 1 / denominator.double()


@dataclass(frozen=True)
class Objective:
    label_loss: LabelLoss
    denominator: Denominator
    entropy_bonus: float = 0.0
    z_loss: float = 0.0
    deepspeed_divisor: bool = False

    @property
    def whole_documents(self) -> bool:
        return self.label_loss.whole_documents

    def coefficients(self, labels: Labels, totals: StepTotals) -> Coefficients:
        """Compute the coefficients of the step's gradient, all denominators included."""
        weight = labels.weight
        if self.deepspeed_divisor:
            weight = weight / max(totals.num_documents, 1)
        slope = self.label_loss(labels).slope * weight
        a, b, c = -slope, None, -slope
        if self.entropy_bonus:
            b = self.entropy_bonus * weight
            a = a + b * labels.entropy
        if self.z_loss:
            a = a + 2 * self.z_loss * weight * labels.logsumexp
        return Coefficients(a, b, c)

    def terms(self, labels: Labels) -> dict[str, torch.Tensor]:
        """Compute each term's contribution per label, [T] in float64: over the step's labels they sum to its loss."""
        weight = labels.weight.double()
        terms = {"policy_loss": self.label_loss(labels).loss * weight}
        if self.entropy_bonus:
            terms["entropy_bonus"] = -self.entropy_bonus * labels.entropy * weight
        if self.z_loss:
            terms["z_loss"] = self.z_loss * labels.logsumexp.double().square() * weight
        return terms
