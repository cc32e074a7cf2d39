"""Corrections for a sampler that differs from the policy: constant weights on each label's policy loss.

A label with weight 0 has no policy gradient but still counts in every denominator. T: labels of a micro-batch.
"""

import math
from dataclasses import dataclass

import torch

from truestep.losses.label_losses import Switch, to_float32
from truestep.losses.labels import Labels, clamped_exp


@dataclass(frozen=True)
class Correction:
    """An importance weight for each label, from the ratio c of the label or of its document."""

    type: str  # truncate, mask or reject
    level: str  # label, document or document_mean
    high: float
    low: float = 0.0

    @property
    def whole_documents(self) -> bool:
        return self.level != "label"

    def log_importance(self, labels: Labels) -> torch.Tensor:  # [T]
        """Return log c for each label: its own, or the sum or the mean over its document."""
        own = labels.log_importance
        if self.level == "label":
            return own
        if self.level == "document":
            return labels.document_sums(own).to(own.dtype)[labels.document]
        return labels.document_means(own)

    def outside(self, labels: Labels) -> tuple[torch.Tensor, torch.Tensor]:  # [T] bool each
        """Return which labels have c below and above the bounds, which are inclusive and rounded to float32."""
        importance, _ = clamped_exp(self.log_importance(labels))
        return importance < to_float32(self.low), importance > to_float32(self.high)

    def weights(self, labels: Labels) -> torch.Tensor:  # [T]
        importance, _ = clamped_exp(self.log_importance(labels))
        if self.type == "truncate":
            return importance.clamp(self.low, self.high)
        below, above = self.outside(labels)
        kept = torch.ones_like(importance) if self.type == "reject" else importance
        return torch.where(below | above, 0, kept)

    def switches(self, labels: Labels) -> list[Switch]:
        bounds = [bound for bound in (self.low, self.high) if bound > 0]
        return [(self.log_importance(labels), math.log(bound)) for bound in bounds]


@dataclass(frozen=True)
class OffPolicyMask:
    """A mask that removes the policy loss of labels with negative advantage, in documents that have become much less
    likely under the policy."""

    threshold: float

    def drift(self, labels: Labels) -> torch.Tensor:  # [T]
        """Compute, for each label, the mean over its document of the sampler's log-prob minus the policy's."""
        return labels.document_means(labels.sampler_logprobs - labels.logprobs)

    def weights(self, labels: Labels) -> torch.Tensor:  # [T]
        left_out = (labels.advantages < 0) & (self.drift(labels) > to_float32(self.threshold))
        return (~left_out).to(labels.logprobs.dtype)

    def switches(self, labels: Labels) -> list[Switch]:
        return [(self.drift(labels), self.threshold)]
