"""The whole objective: a loss, optional terms, and their denominators.

T: labels of a micro-batch; N, D: labels and documents of the whole step.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from truestep.losses.corrections import Correction, OffPolicyMask
from truestep.losses.exploration import ClipCov, EntropyTarget, KlCov
from truestep.losses.label_losses import LabelLoss, LabelTerm, Switch, term_of
from truestep.losses.labels import Labels
from truestep.losses.reference import KlReference
from truestep.types import Coefficients, StepTotals


@dataclass(frozen=True)
class Denominator:
    """The denominator of sums over labels, chosen by `loss.normalize_by`."""

    normalize_by: str
    max_labels: int | None = None

    def label_weights(self, num_labels: torch.Tensor, totals: StepTotals) -> torch.Tensor:  # [T], [T]
        """Compute one over the denominator of each label; `num_labels`: the labels of its whole document."""
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

    def step_scale(self, totals: StepTotals) -> float:
        """Return the weight of a label with these totals, divided by its weight with `ONE_OF_EACH`. This ratio is the
        same for all labels."""
        return 1 / max(totals.num_labels if self.normalize_by == "labels" else totals.num_documents, 1)


# With these totals, results are those of the step times its denominator. They do not depend on the other documents of
# the step.
ONE_OF_EACH = StepTotals(num_documents=1, num_labels=1, num_tokens=1)


@dataclass(frozen=True)
class Objective:
    """The loss with all optional terms, and their weights and denominators."""

    label_loss: LabelLoss
    denominator: Denominator
    entropy_bonus: float = 0.0
    entropy_denominator: Denominator | None = None  # the denominator of the entropy bonus; None: that of the loss
    z_loss: float = 0.0
    # "deepspeed": the number of documents of the step.
    gradient_divisor: float | Literal["deepspeed"] = 1.0
    correction: Correction | None = None
    off_policy_mask: OffPolicyMask | None = None
    recompute: bool = False  # take the trainer's own log-probs before the update as old log-probs
    kl_reference: KlReference | None = None
    entropy_target: EntropyTarget | None = None  # if set, `entropy_bonus` is the weight for the current step
    clip_cov: ClipCov | None = None
    kl_cov: KlCov | None = None
    routers: bool = False  # the loss includes the routers' auxiliary losses, which belong to no label

    def step_scale(self, totals: StepTotals) -> float | None:
        """Return the coefficients with these totals, divided by those with `ONE_OF_EACH`. None: the terms have
        different denominators, so there is no single ratio."""
        scale, other = self.denominator.step_scale(totals), self.entropy_denominator
        if other is not None and other.step_scale(totals) != scale:
            return None
        return scale / max(totals.num_documents, 1) if self.gradient_divisor == "deepspeed" else scale

    @property
    def steered_weight(self) -> float | None:
        """The weight of the entropy bonus if an entropy target moves it, else None."""
        return None if self.entropy_target is None else self.entropy_bonus

    def steered(self, entropy: float | None) -> "Objective":
        """Return the objective for the next step, given the entropy of this step; None: not measured."""
        if self.entropy_target is None or entropy is None:
            return self
        return replace(self, entropy_bonus=self.entropy_target.next_weight(self.entropy_bonus, entropy))

    @property
    def whole_documents(self) -> bool:
        corrected = self.correction is not None and self.correction.whole_documents
        return self.label_loss.whole_documents or corrected or self.off_policy_mask is not None

    def prepare(self, labels: Labels) -> Labels:
        """Set the old log-probs and the advantages of the labels as this objective needs them."""
        if self.recompute:
            labels = labels.recompute()
        if self.kl_reference is not None and self.kl_reference.in_reward:
            labels = replace(labels, advantages=labels.advantages - self.kl_reference.penalty(labels))
        return labels

    @property
    def kl_term(self) -> KlReference | None:
        """The KL divergence from the reference if it is a term of the loss, else None."""
        return None if self.kl_reference is None or self.kl_reference.in_reward else self.kl_reference

    def _entropy_weights(self, labels: Labels, totals: StepTotals) -> torch.Tensor:  # [T] float64
        """Compute one over the denominator of the entropy bonus for each label."""
        if self.entropy_denominator is None:
            return labels.weight.double()
        return self.entropy_denominator.label_weights(labels.document_labels[labels.document], totals)

    @property
    def _weighing(self) -> tuple[Correction | OffPolicyMask | ClipCov | None, ...]:
        return self.correction, self.off_policy_mask, self.clip_cov

    def policy_weights(self, labels: Labels) -> torch.Tensor | None:  # [T]
        """Compute the constant weight of each label's policy loss; None without corrections and masks."""
        parts = [part.weights(labels) for part in self._weighing if part is not None]
        return math.prod(parts[1:], start=parts[0]) if parts else None

    def policy_term(self, labels: Labels) -> LabelTerm:
        """Compute the label loss times its weights. With weight 0 it is 0, even if it was infinite or NaN."""
        term, weights = term_of(self.label_loss, labels), self.policy_weights(labels)
        if weights is None:
            return term
        loss, slope = (torch.where(weights == 0, 0, weights * value) for value in (term.loss, term.slope))
        return replace(term, loss=loss, slope=slope)

    def coefficients(self, labels: Labels, totals: StepTotals) -> Coefficients:
        """Compute the coefficients of the step's gradient, including all denominators."""
        documents = max(totals.num_documents, 1)
        divisor = documents if self.gradient_divisor == "deepspeed" else self.gradient_divisor
        weight = labels.weight / divisor
        slope = self.policy_term(labels).slope * weight
        if self.kl_term is not None:
            slope = slope + self.kl_term.weight * self.kl_term(labels).slope * weight
        if self.kl_cov is not None:
            slope = slope + self.kl_cov.weight * self.kl_cov(labels).slope * weight
        a, b, c = -slope, None, -slope
        if self.entropy_bonus:
            b = (self.entropy_bonus * self._entropy_weights(labels, totals) / divisor).to(slope.dtype)
            a = a + b * labels.entropy
        if self.z_loss:
            a = a + 2 * self.z_loss * weight * labels.logsumexp
        return Coefficients(a, b, c)

    def terms(self, labels: Labels, totals: StepTotals) -> dict[str, torch.Tensor]:
        """Compute each label's part of each term, [T] in float64. Their sum over the step's labels is the loss."""
        weight = labels.weight.double()
        terms = {"policy_loss": self.policy_term(labels).loss * weight}
        if self.kl_term is not None:
            terms["kl_reference"] = self.kl_term.weight * self.kl_term(labels).loss * weight
        if self.kl_cov is not None:
            terms["kl_cov"] = self.kl_cov.weight * self.kl_cov(labels).loss * weight
        if self.entropy_bonus or self.entropy_target is not None:
            terms["entropy_bonus"] = -self.entropy_bonus * labels.entropy * self._entropy_weights(labels, totals)
        if self.z_loss:
            terms["z_loss"] = self.z_loss * labels.logsumexp.double().square() * weight
        return terms

    def switches(self, labels: Labels) -> list[Switch]:
        """List the bounds at which the objective changes its formula."""
        # With recomputed old log-probs, the ratio is 1 in the first update, so it is far from every bound of the loss.
        parts = (None if self.recompute else self.label_loss, self.correction, self.off_policy_mask)
        return [switch for part in parts if part is not None for switch in part.switches(labels)]
