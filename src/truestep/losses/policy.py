"""The five losses of a label, and their slopes in its log-probability.

Each takes `Labels` and gives a `PolicyTerm`. T: labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from truestep.losses.labels import Labels


@dataclass(frozen=True)
class PolicyTerm:
    loss: torch.Tensor  # [T] l_t, before any denominator
    slope: torch.Tensor  # [T] d l_t / d logπ_t


class PolicyLoss(Protocol):
    @property
    def whole_documents(self) -> bool:
        """Whether a label's slope depends on other labels of its document."""
        ...

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Where the ratio is clipped, or None."""
        ...

    def __call__(self, labels: Labels) -> PolicyTerm: ...

    def ratio(self, labels: Labels) -> torch.Tensor: ...


def clip_bounds(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
    """The bounds rounded to float32, so that a float32 ratio can lie exactly on one."""
    return tuple(torch.tensor([1 - epsilon_low, 1 + epsilon_high], dtype=torch.float32).tolist())


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> PolicyTerm:
    """`-min(ρA, clip(ρ)A)` and its slope in log ρ. A ratio exactly on a bound takes the unclipped slope."""
    low, high = bounds
    negative = advantages < 0
    # A zero advantage times an infinite ratio would be NaN.
    surrogate = torch.where(advantages == 0, 0, ratio * advantages)
    loss = -torch.minimum(surrogate, ratio.clamp(low, high) * advantages)
    inside = torch.where(negative, ratio >= low, ratio <= high)
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * advantages), loss)
        inside &= ~(negative & (ratio > dual_clip))
    return PolicyTerm(loss, torch.where(inside, -surrogate, 0))


def label_ratio(labels: Labels) -> torch.Tensor:
    return (labels.logprobs - labels.old_logprobs).exp()


@dataclass(frozen=True)
class Grpo:
    bounds: tuple[float, float]
    dual_clip: float | None = None
    whole_documents: bool = False

    def ratio(self, labels: Labels) -> torch.Tensor:
        return label_ratio(labels)

    def __call__(self, labels: Labels) -> PolicyTerm:
        return clipped_surrogate(self.ratio(labels), labels.advantages, self.bounds, self.dual_clip)


@dataclass(frozen=True)
class Gspo:
    """The document's geometric-mean ratio R_d and mean advantage.

    Every label carries l_d, so with W_d the sum of the labels' weights, dL/dlogπ_t = W_d · (dl_d/dR · R) / N_d. All
    labels of a document have the same weight w = W_d / N_d, hence the slope of a label is dl_d/dR · R itself.
    """

    bounds: tuple[float, float]
    dual_clip: float | None = None
    whole_documents: bool = True

    def ratio(self, labels: Labels) -> torch.Tensor:
        return labels.document_means(labels.logprobs - labels.old_logprobs).exp()

    def __call__(self, labels: Labels) -> PolicyTerm:
        advantages = labels.document_means(labels.advantages)
        return clipped_surrogate(self.ratio(labels), advantages, self.bounds, self.dual_clip)


def _weighted_logprob(importance: torch.Tensor, labels: Labels) -> PolicyTerm:
    """`-sg(importance) A logπ`."""
    slope = torch.where(labels.advantages == 0, 0, -importance * labels.advantages)
    return PolicyTerm(torch.where(slope == 0, 0, slope * labels.logprobs), slope)


@dataclass(frozen=True)
class Reinforce:
    ratio_cap: float = math.inf
    whole_documents: bool = False
    bounds: None = None

    def ratio(self, labels: Labels) -> torch.Tensor:
        return label_ratio(labels)

    def __call__(self, labels: Labels) -> PolicyTerm:
        return _weighted_logprob(self.ratio(labels).clamp(max=self.ratio_cap), labels)


@dataclass(frozen=True)
class Cispo:
    bounds: tuple[float, float]
    whole_documents: bool = False

    def ratio(self, labels: Labels) -> torch.Tensor:
        return label_ratio(labels)

    def __call__(self, labels: Labels) -> PolicyTerm:
        return _weighted_logprob(self.ratio(labels).clamp(*self.bounds), labels)


@dataclass(frozen=True)
class CrossEntropy:
    whole_documents: bool = False
    bounds: None = None

    def ratio(self, labels: Labels) -> torch.Tensor:
        return label_ratio(labels)

    def __call__(self, labels: Labels) -> PolicyTerm:
        return PolicyTerm(-labels.logprobs, torch.full_like(labels.logprobs, -1.0))
