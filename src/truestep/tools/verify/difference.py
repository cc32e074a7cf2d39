"""The differences that `verify` measures, and their bounds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BOUND = 1e-5
ROUNDING = 1e-6  # bound for optimizer states and updates: float32 has seven digits


@dataclass(frozen=True)
class Difference:
    """The difference of a number from the reference, and its bound."""

    step: int
    kind: str
    name: str  # what is compared; if it is wrong, also in which way
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
    """Return for each kind the difference that is largest relative to its bound. NaN is larger than any number."""
    worst: dict[str, Difference] = {}
    for difference in differences:
        known = worst.get(difference.kind)
        if known is None or difference.excess > known.excess:
            worst[difference.kind] = difference
    return worst


def listed(names: Sequence[str]) -> str:
    """List the first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
