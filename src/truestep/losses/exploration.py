"""Options that keep a policy exploring: a target for its entropy, and limits on labels of high covariance.

An update lowers the entropy in proportion to the covariance of logπ and A: it does so if likely labels have high
advantages (Cui et al. 2025). T: labels of a micro-batch.
"""

from dataclasses import dataclass

import torch

from truestep.losses.label_losses import LabelTerm
from truestep.losses.labels import LARGEST_LOG_RATIO, Labels


@dataclass(frozen=True)
class EntropyTarget:
    """A controller that moves the weight of the entropy bonus after each step towards a target entropy, in nats."""

    entropy: float
    rate: float
    largest_weight: float

    def next_weight(self, weight: float, entropy: float) -> float:
        return min(max(weight + self.rate * (self.entropy - entropy), 0.0), self.largest_weight)


@dataclass(frozen=True)
class ClipCov:
    """Clip-Cov: removes the policy loss of a random share of the labels whose covariance is between two bounds."""

    share: float
    low: float
    high: float

    def weights(self, labels: Labels) -> torch.Tensor:  # [T]
        return (labels.chosen == 0).to(labels.logprobs.dtype)


@dataclass(frozen=True)
class KlCov:
    """KL-Cov: adds a KL penalty towards the old policy to the labels with the highest covariance."""

    share: float
    weight: float

    def __call__(self, labels: Labels) -> LabelTerm:
        """Compute the estimate ρ - log ρ - 1 of KL(old ‖ new) at the chosen labels and its slope, without the
        weight."""
        # In float64: near ρ = 1, the estimate is far smaller than the rounding errors of its terms.
        wide = labels.log_ratio.double().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        beyond = labels.log_ratio.abs() > LARGEST_LOG_RATIO
        chosen, dtype = labels.chosen != 0, labels.logprobs.dtype
        value = torch.where(chosen, torch.expm1(wide) - wide, 0).to(dtype)
        return LabelTerm(value, torch.where(chosen & ~beyond, torch.expm1(wide), 0).to(dtype))
