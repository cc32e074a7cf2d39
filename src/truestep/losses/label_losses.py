"""The losses of labels, and their slopes in each label's log-probability.

A loss is a frozen dataclass whose fields are its options, by the names that users type. It takes `Labels` and gives a
`LabelTerm`. Dimensions: T labels.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch

from truestep.config.custom import CustomError
from truestep.losses.labels import Labels, clamped_exp

# A value of each label that decides which formula holds, and the bound at which it changes.
Switch = tuple[torch.Tensor, float]


@dataclass(frozen=True)
class LabelTerm:
    loss: torch.Tensor  # [T] l_t, before any denominator
    slope: torch.Tensor  # [T] d l_t / d logπ_t; of a loss of whole documents, d (Σ l) / d logπ_t over the document
    # [T] bool: a clip, a cap, a mask or a clamp changed the gradient; None where the loss has none of these.
    clipped: torch.Tensor | None = None
    clamped: torch.Tensor | None = None  # [T] bool: the log-ratio is beyond the clamp; None where nothing is clamped


class LabelLoss:
    """The traits of a loss. Code outside this package asks these and never for a loss by its name."""

    whole_documents: ClassVar[bool] = False  # a label's slope depends on other labels of its document
    # It needs no advantage and no old log-probs. Our own losses say so in their options, which import no torch.
    supervised: ClassVar[bool] = False

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest ratio before clipping; None where the loss does not clip."""
        return None

    @property
    def document_ratio(self) -> bool:
        """True where the ratio that the loss looks at, and that metrics are of, is one of each document."""
        return self.whole_documents

    def __call__(self, labels: Labels) -> LabelTerm:
        raise NotImplementedError

    def log_ratio(self, labels: Labels) -> torch.Tensor:  # [T]
        """The log-ratio that this loss looks at: each label's own, or its document's mean."""
        return labels.document_means(labels.log_ratio) if self.document_ratio else labels.log_ratio

    def outside(self, labels: Labels) -> tuple[torch.Tensor, torch.Tensor] | None:  # [T] bool each
        """Tell which labels' ratios are below and above the clip's bounds; None where the loss does not clip."""
        if self.bounds is None:
            return None
        ratio, (low, high) = self.log_ratio(labels).exp(), self.bounds
        return ratio < low, ratio > high

    def switches(self, labels: Labels) -> list[Switch]:
        """List the values at which the loss changes its formula, so that `verify` can keep away from them."""
        return [(self.log_ratio(labels), math.log(bound)) for bound in self.bounds or () if bound > 0]


def term_of(loss: LabelLoss, labels: Labels) -> LabelTerm:
    """Call a loss. A vector that is not one number for each label would spread over all of them unseen."""
    term, name = loss(labels), type(loss).__name__
    if not isinstance(term, LabelTerm):
        raise CustomError(f"{name} gives {type(term).__name__}, not a LabelTerm(loss, slope)")
    for part, value in (("loss", term.loss), ("slope", term.slope)):
        if getattr(value, "shape", None) != labels.logprobs.shape:
            found = list(getattr(value, "shape", ())) or "a single number"
            raise CustomError(f"{name} gives as {part} {found}, not one number for each label")
    return term


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
    return to_float32(1 - epsilon_low), to_float32(1 + epsilon_high)


def to_float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def stopped(term: LabelTerm, clamped: torch.Tensor) -> LabelTerm:
    """Take the gradient of labels whose log-ratio is beyond the clamp."""
    lost = clamped & (term.slope != 0)
    clipped = lost if term.clipped is None else term.clipped | lost
    return LabelTerm(term.loss, torch.where(clamped, 0, term.slope), clipped, clamped)


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
    return LabelTerm(loss, torch.where(inside, -surrogate, 0), ~inside & (advantages != 0))


def weighted_logprob(ratio: torch.Tensor, labels: Labels, low: float, high: float) -> LabelTerm:
    """Compute `-clip(ρ, low, high) · A · logπ`, where the clipped ratio counts as a constant, and its slope."""
    slope = -ratio.clamp(low, high) * labels.advantages
    clipped = ((ratio < low) | (ratio > high)) & (labels.advantages != 0)
    # A log-prob may be infinitely small, and 0 · inf is NaN.
    return LabelTerm(torch.where(slope == 0, 0, slope * labels.logprobs), slope, clipped)


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
        ratio, clamped = clamped_exp(self.log_ratio(labels))
        return stopped(clipped_surrogate(ratio, labels.advantages, self.bounds, self.dual_clip), clamped)


@dataclass(frozen=True)
class Gspo(Grpo):
    """Clips the document's geometric-mean ratio R_d, with each label's own advantage.

    The slope is that of R_d · exp(logπ_t - sg(logπ_t)) for the ratio. Where all labels of a document have one
    advantage and one weight it is the derivative of the document's sum.
    """

    whole_documents: ClassVar[bool] = True


@dataclass(frozen=True)
class Reinforce(LabelLoss):
    ratio_cap: float | None = None

    def __call__(self, labels: Labels) -> LabelTerm:
        cap = math.inf if self.ratio_cap is None else self.ratio_cap
        ratio, clamped = clamped_exp(self.log_ratio(labels))
        return stopped(weighted_logprob(ratio, labels, 0.0, cap), clamped)

    def switches(self, labels: Labels) -> list[Switch]:
        return [] if self.ratio_cap is None else [(self.log_ratio(labels), math.log(self.ratio_cap))]


@dataclass(frozen=True)
class Cispo(Clipped):
    def __call__(self, labels: Labels) -> LabelTerm:
        ratio, clamped = clamped_exp(self.log_ratio(labels))
        return stopped(weighted_logprob(ratio, labels, *self.bounds), clamped)


@dataclass(frozen=True)
class Sapo(LabelLoss):
    """A soft gate in place of a clip: the slope falls off smoothly on both sides of ρ = 1."""

    tau_positive: float
    tau_negative: float

    def __call__(self, labels: Labels) -> LabelTerm:
        (ratio, clamped), advantages = clamped_exp(self.log_ratio(labels)), labels.advantages
        tau = torch.full_like(ratio, self.tau_positive).masked_fill(advantages < 0, self.tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1))
        slope = -4 * gate * torch.sigmoid(-tau * (ratio - 1)) * ratio * advantages
        return stopped(LabelTerm(-4 / tau * gate * advantages, slope), clamped)


@dataclass(frozen=True)
class Gmpo(LabelLoss):
    """Takes the geometric mean of ratios that are clipped one by one, on the side that the advantage's sign says."""

    epsilon_low: float
    epsilon_high: float
    whole_documents: ClassVar[bool] = True

    @property
    def document_ratio(self) -> bool:
        return False  # each label's own ratio is clipped

    @cached_property
    def log_bounds(self) -> tuple[float, float]:
        return to_float32(-self.epsilon_low), to_float32(self.epsilon_high)

    def __call__(self, labels: Labels) -> LabelTerm:
        (low, high), log_ratio, advantages = self.log_bounds, labels.log_ratio, labels.advantages
        sign = advantages.sign()
        effective = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(low, high))
        ratio, clamped = clamped_exp(labels.document_means(effective))
        surrogate = ratio * advantages
        inside = torch.where(advantages < 0, log_ratio >= low, log_ratio <= high)
        term = LabelTerm(-surrogate, torch.where(inside, -surrogate, 0), ~inside & (advantages != 0))
        return stopped(term, clamped)

    def outside(self, labels: Labels) -> tuple[torch.Tensor, torch.Tensor] | None:
        low, high = self.log_bounds
        return labels.log_ratio < low, labels.log_ratio > high

    def switches(self, labels: Labels) -> list[Switch]:
        return [(labels.log_ratio, bound) for bound in self.log_bounds]


@dataclass(frozen=True)
class Dppo(LabelLoss):
    """Masks labels that move outward and whose probability has moved too far from the old one."""

    divergence: str
    threshold: float

    def __call__(self, labels: Labels) -> LabelTerm:
        log_ratio, advantages = self.log_ratio(labels), labels.advantages
        ratio, clamped = clamped_exp(log_ratio)
        # In float32, as the ratio is where other losses compare it.
        masked = (advantages * log_ratio > 0) & (self.moved(labels) > to_float32(self.threshold))
        surrogate = torch.where(masked, 0, ratio * advantages)
        return stopped(LabelTerm(-surrogate, -surrogate, masked), clamped)

    def moved(self, labels: Labels) -> torch.Tensor:  # [T]
        """Measure how far each label's probability is from the old one."""
        new, old = labels.logprobs, labels.old_logprobs
        if self.divergence == "tv":
            return (new.exp() - old.exp()).abs()
        # The label against the rest of the vocabulary. A label that was certain has no rest.
        rest_new, rest_old = -new.expm1(), -old.expm1()
        of_rest = torch.where(rest_old > 0, rest_old * (rest_old.log() - rest_new.log()), 0)
        return old.exp() * (old - new) + of_rest

    def switches(self, labels: Labels) -> list[Switch]:
        return [(self.moved(labels), self.threshold)]


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
    "sapo": Sapo,
    "gmpo": Gmpo,
    "dppo": Dppo,
    "cross_entropy": CrossEntropy,
}
