"""The losses of labels, and their slopes in each label's log-probability.

A loss is a frozen dataclass whose fields are its options, by the names that users type. It takes `Labels` and gives a
`LabelTerm`. Dimensions: T labels.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch

from truestep.custom import CustomError
from truestep.losses.labels import Labels


@dataclass(frozen=True)
class LabelTerm:
    loss: torch.Tensor  # [T] l_t, before any denominator
    slope: torch.Tensor  # [T] d l_t / d logπ_t; of a loss of whole documents, d (Σ l) / d logπ_t over the document


class LabelLoss:
    """The traits of a loss. Code outside this package asks these and never for a loss by its name."""

    whole_documents: ClassVar[bool] = False  # a label's slope depends on other labels of its document
    # It needs no advantage and no old log-probs. Our own losses say so in their options, which import no torch.
    supervised: ClassVar[bool] = False

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest ratio before clipping; None where the loss does not clip."""
        return None

    def __call__(self, labels: Labels) -> LabelTerm:
        raise NotImplementedError

    def log_ratio(self, labels: Labels) -> torch.Tensor:  # [T]
        """The log-ratio that this loss looks at: each label's own, or its document's mean."""
        return labels.document_means(labels.log_ratio) if self.whole_documents else labels.log_ratio


def make_label_loss(options: Any) -> LabelLoss:
    """Make the loss that a `loss` section of the configuration describes."""
    if (custom := getattr(options, "custom", None)) is not None:
        if not isinstance(custom, LabelLoss):
            raise CustomError(
                f"loss.function {options.function!r}: {type(custom).__name__} does not derive from "
                "truestep.losses.label_losses.LabelLoss"
            )
        return custom
    kind = _BY_TYPE[options.type]
    return kind(**{item.name: getattr(options, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def round_bounds(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
    """Round the bounds of a ratio to float32, so that a float32 ratio can lie exactly on one."""
    low, high = torch.tensor([1 - epsilon_low, 1 + epsilon_high], dtype=torch.float32).tolist()
    return low, high


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> LabelTerm:
    """Compute `-min(ρA, clip(ρ)A)` and its slope in log ρ. A ratio exactly on a bound takes the unclipped slope."""
    low, high = bounds
    negative = advantages < 0
    # A zero advantage times an infinite ratio would be NaN.
    surrogate = torch.where(advantages == 0, 0, ratio * advantages)
    loss = -torch.minimum(surrogate, ratio.clamp(low, high) * advantages)
    inside = torch.where(negative, ratio >= low, ratio <= high)
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * advantages), loss)
        inside &= ~(negative & (ratio > dual_clip))
    return LabelTerm(loss, torch.where(inside, -surrogate, 0))


def weighted_logprob(importance: torch.Tensor, labels: Labels) -> LabelTerm:
    """Compute `-importance · A · logπ`, where the importance counts as a constant, and its slope."""
    slope = torch.where(labels.advantages == 0, 0, -importance * labels.advantages)
    return LabelTerm(torch.where(slope == 0, 0, slope * labels.logprobs), slope)


@dataclass(frozen=True)
class Clipped(LabelLoss):
    epsilon_low: float
    epsilon_high: float

    @cached_property
    def bounds(self) -> tuple[float, float]:
        return round_bounds(self.epsilon_low, self.epsilon_high)


@dataclass(frozen=True)
class Grpo(Clipped):
    dual_clip: float | None = None

    def __call__(self, labels: Labels) -> LabelTerm:
        return clipped_surrogate(self.log_ratio(labels).exp(), labels.advantages, self.bounds, self.dual_clip)


@dataclass(frozen=True)
class Gspo(Clipped):
    """Clips the document's geometric-mean ratio R_d, with the document's mean advantage.

    Every label carries l_d, so with W_d the sum of the labels' weights, dL/dlogπ_t = W_d · (dl_d/dR · R) / N_d. All
    labels of a document have the same weight w = W_d / N_d, hence the slope of a label is dl_d/dR · R itself.
    """

    dual_clip: float | None = None
    whole_documents: ClassVar[bool] = True

    def __call__(self, labels: Labels) -> LabelTerm:
        advantages = labels.document_means(labels.advantages)
        return clipped_surrogate(self.log_ratio(labels).exp(), advantages, self.bounds, self.dual_clip)


@dataclass(frozen=True)
class Reinforce(LabelLoss):
    ratio_cap: float | None = None

    def __call__(self, labels: Labels) -> LabelTerm:
        cap = math.inf if self.ratio_cap is None else self.ratio_cap
        return weighted_logprob(self.log_ratio(labels).exp().clamp(max=cap), labels)


@dataclass(frozen=True)
class Cispo(Clipped):
    def __call__(self, labels: Labels) -> LabelTerm:
        return weighted_logprob(self.log_ratio(labels).exp().clamp(*self.bounds), labels)


@dataclass(frozen=True)
class CrossEntropy(LabelLoss):
    def __call__(self, labels: Labels) -> LabelTerm:
        return LabelTerm(-labels.logprobs, torch.full_like(labels.logprobs, -1.0))


# The loss that each `loss.type` picks.
_BY_TYPE: dict[str, type[LabelLoss]] = {
    "grpo": Grpo,
    "gspo": Gspo,
    "reinforce": Reinforce,
    "cispo": Cispo,
    "cross_entropy": CrossEntropy,
}
