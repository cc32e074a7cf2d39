"""Finds the terms of a sum that are outliers for their weight."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from truestep.tools.replay.search import Part

_FAR = 6.0  # an outlier is at least so many spreads above the typical term
_FLOOR = 0.25  # a spread is at least this share of the typical term
_FEW = 0.1  # the largest share of all members that counts as few


@dataclass(frozen=True)
class Typical:
    """The typical term per unit of weight, for example per label of a document, and the spread around it."""

    weights: Mapping[int, float]
    centre: float
    spread: float

    @staticmethod
    def of(parts: Sequence[Part], weights: Mapping[int, float]) -> "Typical":
        """Take the median over all members, and the median distance from it. Of members that were only measured
        together, the mean's distance grows with the root of their number."""
        rates = sorted(
            (one.part / weight, len(one.members))
            for one in parts
            if (weight := sum(weights[member] for member in one.members)) > 0
        )
        if not rates:
            return Typical(weights, 0.0, 0.0)
        half, centre = sum(members for _, members in rates) / 2, rates[-1][0]
        for rate, members in rates:
            half -= members
            if half <= 0:
                centre = rate
                break
        distances = [abs(rate - centre) * members**0.5 for rate, members in rates]
        spread = 1.4826 * statistics.median_low(distances)
        return Typical(weights, centre, max(spread, _FLOOR * abs(centre)))

    def excess(self, one: Part) -> float:
        """Return by how much a term exceeds the typical term of its weight."""
        return one.part - self.centre * self._weight(one)

    def far(self, one: Part) -> bool:
        return self.excess(one) > _FAR * self.spread * self._weight(one)

    def few_together(self, parts: Iterable[Part], wanted: float) -> list[int]:
        """Return the few members whose excess explains the amount; none if it takes many."""
        ranked = sorted(parts, key=lambda one: -self.excess(one) / len(one.members))
        total, chosen, count = 0.0, list[int](), sum(len(one.members) for one in ranked)
        for one in ranked:
            if total >= wanted:
                break
            total, chosen = total + self.excess(one), [*chosen, *one.members]
        return sorted(chosen) if total >= wanted > 0 and len(chosen) <= max(1, _FEW * count) else []

    def _weight(self, one: Part) -> float:
        return sum(self.weights[member] for member in one.members)
