"""What keeps a policy exploring: a target for its entropy, and labels of high covariance held back.

An update lowers the entropy by the covariance of logπ and A: where labels that are likely already have high advantages
(Cui et al. 2025). T: labels of a micro-batch.
"""

from dataclasses import dataclass

import torch

from truestep.losses.label_losses import LabelTerm
from truestep.losses.labels import LARGEST_LOG_RATIO, Labels


@dataclass(frozen=True)
class EntropyTarget:
    """Moves the weight of the entropy bonus after each step, by how far the step's entropy is below the target."""

    entropy: float
    rate: float
    largest_weight: float

    def next_weight(self, weight: float, entropy: float) -> float:
        return min(max(weight + self.rate * (self.entropy - entropy), 0.0), self.largest_weight)


@dataclass(frozen=True)
class ClipCov:
    """Takes the policy loss of the labels that were chosen: some, at random, whose covariance lies in a band."""

    share: float
    low: float
    high: float

    def weights(self, labels: Labels) -> torch.Tensor:  # [T]
        return (labels.chosen == 0).to(labels.logprobs.dtype)


@dataclass(frozen=True)
class KlCov:
    """Holds the labels that were chosen, those of the highest covariance, near to the old policy."""

    share: float
    weight: float

    def __call__(self, labels: Labels) -> LabelTerm:
        """Estimate the divergence of the old policy from the new at the chosen labels, ρ - log ρ - 1, and its slope,
        without the weight."""
        # In float64: near ρ = 1, what is left is far below the rounding of its parts.
        wide = labels.log_ratio.double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        beyond = labels.log_ratio.abs() > LARGEST_LOG_RATIO
        chosen, dtype = labels.chosen != 0, labels.logprobs.dtype
        value = torch.where(chosen, torch.expm1(wide) - wide, 0).to(dtype)
        return LabelTerm(value, torch.where(chosen & ~beyond, torch.expm1(wide), 0).to(dtype))
