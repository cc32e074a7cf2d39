"""What `verify` measures: how far a number is from what it must be, and how far it may be."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BOUND = 1e-5
ROUNDING = 1e-6  # of an optimizer's states, and of updates by a user's own code: float32 has seven digits


@dataclass(frozen=True)
class Difference:
    step: int
    kind: str
    name: str  # of what is compared; where it is wrong, also in which way
    value: float
    bound: float = BOUND

    @property
    def wrong(self) -> bool:
        return not self.value <= self.bound  # NaN is wrong

    @property
    def excess(self) -> float:
        if math.isnan(self.value):
            return math.inf
        return self.value / self.bound if self.bound else math.inf * self.value if self.value else 0.0


def worst_of_each_kind(differences: Iterable[Difference]) -> dict[str, Difference]:
    """Find the difference of each kind that is furthest beyond its bound; NaN is further than any number."""
    worst: dict[str, Difference] = {}
    for difference in differences:
        known = worst.get(difference.kind)
        if known is None or difference.excess > known.excess:
            worst[difference.kind] = difference
    return worst


def listed(names: Sequence[str]) -> str:
    """Name some of many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
