"""Finds what is wrong with an update: the one of many possible faults that reproduces the wrong numbers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from truestep.tools.verify.difference import BOUND, Difference, listed
from truestep.tools.verify.oracle.updates import (
    RIGHT,
    Change,
    Interval,
    Moment,
    State,
    UpdateOracle,
    Variant,
    beyond,
    half_unit,
    updated,
)

_FEW = 1e-3  # share of a weight's numbers that a fault need not reproduce
_FITS = 2.0  # largest mean squared residual of a fit, in units of half a float32 ulp; rounding alone gives 1/3
# Faults in the bias correction and the epsilon of an update.
_VARIANTS = {
    ("bias correction", "is left out"): Variant(first_correction=False, second_correction=False),
    ("bias correction", "of the first moment is left out"): Variant(first_correction=False),
    ("bias correction", "of the second moment is left out"): Variant(second_correction=False),
    ("bias correction", "is that of the next update"): Variant(later=1),
    ("bias correction", "is that of the update before"): Variant(later=-1),
    ("epsilon", "is within the root"): Variant(epsilon_inside=True),
    ("epsilon", "is left out"): Variant(epsilon=0.0),
}


class Blame:
    """Collects the worst difference of each kind in one update. Its description is that of the largest wrong weight,
    followed by a list of all wrong weights."""

    def __init__(self, number: int):
        self._number = number
        self._worst: dict[str, Difference] = {}
        self._wrong: dict[str, dict[str, tuple[int, str]]] = {}

    def found(self, kind: str, weight: str, text: str, value: float, bound: float = BOUND, numbers: int = 0) -> None:
        difference = Difference(self._number, kind, text, value, bound)
        if difference.wrong:
            self._wrong.setdefault(kind, {}).setdefault(weight, (numbers, text))
        known = self._worst.get(kind)
        if known is None or difference.excess > known.excess:
            self._worst[kind] = difference

    def differences(self) -> Iterator[Difference]:
        for kind, worst in self._worst.items():
            name = worst.name
            if wrong := self._wrong.get(kind):
                name = f"{max(wrong.values(), key=lambda each: each[0])[1]} ({listed(list(wrong))})"
            yield Difference(worst.step, kind, name, worst.value, worst.bound)


@dataclass(frozen=True)
class Judged:
    """One weight and its update."""

    oracle: UpdateOracle
    name: str
    weight: Tensor
    found: Tensor  # the weight after the update
    gradient: Tensor  # the clipped gradient that the optimizer used
    before: State
    after: State
    number: int
    rate: float

    @property
    def decay(self) -> float:
        return self.oracle.decay(self.weight)

    @property
    def moments_stood_still(self) -> bool:
        zeros = {kind: torch.zeros_like(value) for kind, value in self.after.items()}
        kept = {**zeros, **self.before}
        still = all(value.equal(kept[kind]) for kind, value in self.after.items() if value.ndim)
        return still and bool(self.gradient.any()) and bool(self.after)

    def moments(self, gradient: Tensor | None = None) -> dict[str, Moment]:
        taken = self.gradient if gradient is None else gradient
        return self.oracle.moments(self.name, self.weight, taken, self.before, self.after, self.number)

    def change(self, variant: Variant = RIGHT) -> Change:
        return self.oracle.change(
            self.name, self.weight, self.gradient, self.before, self.after, self.number, self.rate, variant
        )

    def outside(self, right: Interval) -> Tensor:
        """Return the distance of each number from its interval; 0 inside."""
        return self.found - torch.minimum(torch.maximum(self.found, right.low), right.high)

    def factor_of_the_gradient(self) -> float | None:
        """Return the factor of the gradient that explains all moments, or None if no factor does."""
        zero, whole = self.moments(torch.zeros_like(self.gradient)), self.moments()
        kind = min(whole)  # the first moment comes first in the alphabet: exp_avg or momentum_buffer
        part = _middle(whole[kind]) - _middle(zero[kind])
        if len(whole) < 2 or not float(part.square().sum()):
            return None  # with a single moment, a wrong beta would look the same
        factor = float(((whole[kind].found - _middle(zero[kind])) * part).sum() / part.square().sum())
        explained = self.moments(self.gradient * factor).values()
        if self.oracle.rule(self.name, self.weight) == "adamw_8bit":  # 8-bit levels are a few percent apart
            return factor if abs(factor - 1) > 0.1 and all(beyond(moment) < 0.05 for moment in explained) else None
        return factor if all(beyond(moment) < 1e-4 for moment in explained) else None

    def moment_text(self, kind: str, moment: Moment, value: float) -> str:
        right = _middle(moment)
        factor = float((moment.found * right).sum() / right.square().sum().clamp(min=1e-300))
        rounded = value < 0.01 and moment.found.equal(moment.found.bfloat16().double())
        return f"{kind} is {factor:.4g} times what it should be{', rounded to bfloat16' if rounded else ''}"

    def explained(self, right: Change) -> tuple[str, str]:
        """Return the kind of the fault, and its description."""
        if self.found.equal(self.found.bfloat16().double()):
            return "precision", "of the weights is that of bfloat16"
        wrong = self._wrong(right)
        if self.found[wrong].equal(self.weight[wrong]):
            return "update", f"leaves {int(wrong.sum()):,} of {wrong.numel():,} numbers as they were"
        if self.oracle.rule(self.name, self.weight) != "muon":
            epsilon = self._epsilon(right)
            variants = {**_VARIANTS, ("epsilon", f"is {epsilon:g}"): Variant(epsilon=epsilon)}
            for named, variant in variants.items():
                if self.number + variant.later > 0:
                    left = self._wrong(self.change(variant))
                    if float(left.double().mean()) <= min(_FEW, 0.1 * float(wrong.double().mean())):
                        return named
        return self._fitted(right)

    def _wrong(self, change: Change) -> Tensor:
        """Return a mask of the numbers that a change does not explain."""
        outside = self.outside(updated(self.weight, self.rate, self.decay, change))
        return (outside != 0) | ~self.found.isfinite()

    def _epsilon(self, right: Change) -> float:
        """Estimate the epsilon that the update used, in case it is a different one."""
        exact = self.change(Variant(epsilon=0.0)).step
        made = self.weight * (1 - self.rate * self.decay) - self.found
        # step = rate * m / (root + epsilon), so epsilon / root = exact / made - 1. `root` is computed from the right
        # step.
        root = self.oracle.options["epsilon"] * right.step / (exact - right.step)
        found = root * (exact / made - 1)
        usual = found[(made * exact > 0) & (root > 0) & root.isfinite()]
        return max(0.0, float(f"{float(usual.median()):.1g}")) if len(usual) else 0.0

    def _fitted(self, right: Change) -> tuple[str, str]:
        """Fit the difference from the right update by least squares, along the step and along the weight (decay)."""
        unit = half_unit(torch.maximum(self.weight.abs(), self.found.abs())) + right.slack
        left = (self.found - self.weight * (1 - self.rate * self.decay) + right.step).flatten() / unit.flatten()
        along = {
            "weight decay": -self.weight.flatten() / unit.flatten(),
            "update": -right.step.flatten() / unit.flatten(),
        }
        best: tuple[float, dict[str, float]] = (math.inf, {})
        for kinds in (("weight decay",), ("update",), ("weight decay", "update")):
            matrix = torch.stack([along[kind] for kind in kinds], 1)
            sizes = torch.linalg.lstsq(matrix, left[:, None]).solution
            mean_square = float((left - (matrix @ sizes)[:, 0]).square().mean())
            if mean_square < 0.5 * best[0]:  # both together, only if neither fits alone
                best = mean_square, dict(zip(kinds, sizes.flatten().tolist(), strict=True))
        mean_square, found = best
        size = float(left.square().mean())
        if not mean_square < max(_FITS, 1e-4 * size):
            return "update", "is no multiple of what moments and rate give"
        if "weight decay" in found and self.rate and ("update" not in found or abs(found["update"]) < 1e-3):
            return "weight decay", f"is {self.decay + found['weight decay'] / self.rate:.3g}, not {self.decay:g}"
        return "update", f"is {1 + found.get('update', 0.0):.4g} times what moments and rate give"


def _middle(moment: Moment) -> Tensor:
    return (moment.right.low + moment.right.high) / 2
