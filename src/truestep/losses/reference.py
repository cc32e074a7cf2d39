"""The KL divergence from a reference, as a term of the loss or of the reward. T: labels of a micro-batch."""

from dataclasses import dataclass

import torch

from truestep.losses.label_losses import LabelTerm
from truestep.losses.labels import LARGEST_LOG_RATIO, Labels, clamped_exp


@dataclass(frozen=True)
class KlReference:
    """An estimate of the KL divergence from the reference, on the sampled labels."""

    weight: float
    estimator: str  # k1, k2, k3 or unbiased
    in_reward: bool = False

    def __call__(self, labels: Labels) -> LabelTerm:
        """Compute the estimate at each label and its slope in the label's log-prob, both without the weight."""
        distance = labels.logprobs - labels.reference_logprobs
        if self.estimator == "k1":
            return LabelTerm(distance, torch.ones_like(distance))
        if self.estimator == "k2":
            return LabelTerm(distance.square() / 2, distance)
        # In float64: near r = 0 (r is the log-ratio), exp(-r) - 1 + r is far smaller than the rounding errors of its
        # terms.
        wide = distance.double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        beyond = distance.abs() > LARGEST_LOG_RATIO
        value, slope = torch.expm1(-wide) + wide, -torch.expm1(-wide)
        if self.estimator == "unbiased":
            ratio, clamped = clamped_exp(labels.log_ratio)
            beyond = beyond | clamped
            value, slope = ratio * value, ratio * wide
        dtype = distance.dtype
        return LabelTerm(value.to(dtype), torch.where(beyond, 0, slope).to(dtype))

    def penalty(self, labels: Labels) -> torch.Tensor:  # [T]
        """Compute the constant that is subtracted from each label's advantage if `in_reward` is set. It has no
        gradient."""
        return self.weight * (labels.old_logprobs - labels.reference_logprobs)
