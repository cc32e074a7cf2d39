"""The losses: for each label, its loss and the slope of the loss in the label's log-prob.

A loss is a frozen dataclass. Its fields are its options, named as in the configuration. It maps `Labels` to a
`LabelTerm`. Dimensions: T labels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from truestep.config.custom import CustomError
from truestep.config.held import label_of
from truestep.losses.labels import Labels, clamped_exp

# A value of each label [T], and the bound at which the loss changes its formula.
Switch = tuple[torch.Tensor, float]


@dataclass(frozen=True)
class LabelTerm:
    """The loss of each label and its slope."""

    loss: torch.Tensor  # [T] l_t, before any denominator
    slope: torch.Tensor  # [T] d l_t / d logπ_t; for `whole_documents`: of the sum of l over the document
    # [T] bool: a clip, cap, mask or clamp changed the gradient; None for losses without any of these.
    clipped: torch.Tensor | None = None
    clamped: torch.Tensor | None = None  # [T] bool: the log-ratio exceeds the clamp; None for losses without a clamp


class LabelLoss:
    """The base class of losses. Other packages look only at these traits, never at a loss's name."""

    whole_documents: ClassVar[bool] = False  # a label's slope depends on other labels of its document
    # True if the loss needs no advantages and no old log-probs. Built-in losses declare this in `config.losses`, which
    # imports no torch.
    supervised: ClassVar[bool] = False

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The bounds of the ratio beyond which the loss clips; None if the loss does not clip."""
        return None

    @property
    def document_ratio(self) -> bool:
        """True if the loss uses one ratio per document, which metrics then report too."""
        return self.whole_documents

    def __call__(self, labels: Labels) -> LabelTerm:
        """Compute the loss of each label and its slope."""
        raise NotImplementedError

    def log_ratio(self, labels: Labels) -> torch.Tensor:  # [T]
        """Return the log-ratio that this loss uses: each label's own, or the mean of its document."""
        return labels.document_means(labels.log_ratio) if self.document_ratio else labels.log_ratio

    def outside(self, labels: Labels) -> tuple[torch.Tensor, torch.Tensor] | None:  # [T] bool each
        """Return which labels have a ratio below and above the clip bounds; None if the loss does not clip."""
        if self.bounds is None:
            return None
        ratio, (low, high) = self.log_ratio(labels).exp(), self.bounds
        return ratio < low, ratio > high

    def switches(self, labels: Labels) -> list[Switch]:
        """List the bounds at which the loss changes its formula, so that `verify` can avoid labels close to one."""
        return [(self.log_ratio(labels), math.log(bound)) for bound in self.bounds or () if bound > 0]


@dataclass(frozen=True)
class FunctionLoss(LabelLoss):
    """A user's function of the labels. It returns a LabelTerm, or only the loss of each label; then autograd computes
    the slope."""

    function: Callable[[Labels], Any]
    name: str
    whole_documents: ClassVar[bool] = True  # the function may use sums over documents

    @property
    def document_ratio(self) -> bool:
        return False

    def __call__(self, labels: Labels) -> LabelTerm:
        with torch.enable_grad():
            of_oracle = labels.logprobs.requires_grad  # `verify` differentiates the loss itself
            logprobs = labels.logprobs if of_oracle else labels.logprobs.detach().requires_grad_()
            returned = self.function(replace(labels, logprobs=logprobs))
            if not isinstance(returned, torch.Tensor) or returned.shape != logprobs.shape:
                return returned if isinstance(returned, LabelTerm) else LabelTerm(returned, logprobs)
            if not returned.requires_grad:
                return LabelTerm(returned, torch.zeros_like(returned))
            (slope,) = torch.autograd.grad(returned.sum(), logprobs, retain_graph=of_oracle, allow_unused=True)
        slope = torch.zeros_like(returned) if slope is None else slope
        return LabelTerm(returned if of_oracle else returned.detach(), slope)


def term_of(loss: LabelLoss, labels: Labels) -> LabelTerm:
    """Call a loss and check the shapes of its result. Without the check, broadcasting would hide a wrong shape."""
    term, name = loss(labels), getattr(loss, "name", type(loss).__name__)
    if not isinstance(term, LabelTerm):
        raise CustomError(f"{name} gives {type(term).__name__}, not a LabelTerm(loss, slope)")
    for part, value in (("loss", term.loss), ("slope", term.slope)):
        if getattr(value, "shape", None) != labels.logprobs.shape:
            found = list(getattr(value, "shape", ())) or "a single number"
            raise CustomError(f"{name} gives as {part} {found}, not one number for each label")
    return term


def make_label_loss(options: Any) -> LabelLoss:
    """Make the loss from the configuration's `loss` section."""
    if (custom := getattr(options, "custom", None)) is not None:
        if isinstance(custom, LabelLoss):
            return custom
        if isinstance(custom, type) or not callable(custom):
            raise CustomError(
                f"loss.function {options.function!r}: {type(custom).__name__} does not derive from "
                "truestep.losses.label_losses.LabelLoss"
            )
        return FunctionLoss(custom, label_of(custom))
    kind = _BY_TYPE[options.type]
    return kind(**{item.name: getattr(options, item.name) for item in fields(kind)})  # type: ignore[arg-type]


def round_bounds(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
    """Round the bounds of a ratio to float32, so that a float32 ratio can lie exactly on one."""
    return to_float32(1 - epsilon_low), to_float32(1 + epsilon_high)


def to_float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def stopped(term: LabelTerm, clamped: torch.Tensor) -> LabelTerm:
    """Set the slope of clamped labels to 0. Mark those whose slope was not 0 as clipped."""
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
    """Compute `-clip(ρ, low, high) · A · logπ` and its slope, with the clipped ratio as a constant (stop-gradient)."""
    slope = -ratio.clamp(low, high) * labels.advantages
    clipped = ((ratio < low) | (ratio > high)) & (labels.advantages != 0)
    # A log-prob may be -inf, and 0 · inf is NaN.
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
    """GRPO and PPO: the clipped surrogate of each label."""

    dual_clip: float | None = None

    def __call__(self, labels: Labels) -> LabelTerm:
        ratio, clamped = clamped_exp(self.log_ratio(labels))
        return stopped(clipped_surrogate(ratio, labels.advantages, self.bounds, self.dual_clip), clamped)


@dataclass(frozen=True)
class Gspo(Grpo):
    """GSPO: clips the geometric mean R_d of a document's ratios, with each label's own advantage.

    For the slope, the ratio is R_d · exp(logπ_t - sg(logπ_t)). If all labels of a document have the same advantage and
    weight, it is the derivative of the document's sum.
    """

    whole_documents: ClassVar[bool] = True


@dataclass(frozen=True)
class Reinforce(LabelLoss):
    """Policy gradient weighted by the capped ratio."""

    ratio_cap: float | None = None

    def __call__(self, labels: Labels) -> LabelTerm:
        cap = math.inf if self.ratio_cap is None else self.ratio_cap
        ratio, clamped = clamped_exp(self.log_ratio(labels))
        return stopped(weighted_logprob(ratio, labels, 0.0, cap), clamped)

    def switches(self, labels: Labels) -> list[Switch]:
        return [] if self.ratio_cap is None else [(self.log_ratio(labels), math.log(self.ratio_cap))]


@dataclass(frozen=True)
class Cispo(Clipped):
    """CISPO: policy gradient weighted by the clipped ratio."""

    def __call__(self, labels: Labels) -> LabelTerm:
        ratio, clamped = clamped_exp(self.log_ratio(labels))
        return stopped(weighted_logprob(ratio, labels, *self.bounds), clamped)


@dataclass(frozen=True)
class Sapo(LabelLoss):
    """SAPO: a soft gate instead of a clip. The gate's factor on the slope falls smoothly on both sides of ρ = 1."""

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
    """GMPO: the geometric mean of a document's ratios, each clipped on the side given by the advantage's sign."""

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
    """DPPO: masks labels whose probability is too far from the old one, if the gradient would move it further away."""

    divergence: str
    threshold: float

    def __call__(self, labels: Labels) -> LabelTerm:
        log_ratio, advantages = self.log_ratio(labels), labels.advantages
        ratio, clamped = clamped_exp(log_ratio)
        # The threshold is rounded to float32, as are the bounds of other losses.
        masked = (advantages * log_ratio > 0) & (self.moved(labels) > to_float32(self.threshold))
        surrogate = torch.where(masked, 0, ratio * advantages)
        return stopped(LabelTerm(-surrogate, -surrogate, masked), clamped)

    def moved(self, labels: Labels) -> torch.Tensor:  # [T]
        """Compute the divergence of each label's probability from the old one: total variation, or binary KL."""
        new, old = labels.logprobs, labels.old_logprobs
        if self.divergence == "tv":
            return (new.exp() - old.exp()).abs()
        # Binary KL: the label against the rest of the vocabulary. The rest has probability 0 if the label had
        # probability 1.
        rest_new, rest_old = -new.expm1(), -old.expm1()
        of_rest = torch.where(rest_old > 0, rest_old * (rest_old.log() - rest_new.log()), 0)
        return old.exp() * (old - new) + of_rest

    def switches(self, labels: Labels) -> list[Switch]:
        return [(self.moved(labels), self.threshold)]


@dataclass(frozen=True)
class CrossEntropy(LabelLoss):
    """The supervised loss."""

    def __call__(self, labels: Labels) -> LabelTerm:
        return LabelTerm(-labels.logprobs, torch.full_like(labels.logprobs, -1.0))


# The class of each `loss.type`.
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
