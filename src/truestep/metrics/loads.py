"""How evenly a step's tokens are spread over experts: metrics of the counts of choices, by layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

Counts = Mapping[str, torch.Tensor]  # choices of each expert, [E], by layer


def together(first: Counts, second: Counts) -> dict[str, torch.Tensor]:
    """Add up the counts of two parts of a step. Each may have layers that the other lacks."""
    return {**first, **second, **{name: first[name] + second[name] for name in first.keys() & second.keys()}}


def shares_of(counts: Counts) -> dict[str, torch.Tensor]:
    """Return each expert's share of its layer's choices, in float64; 0 where a layer has none."""
    return {name: own.double() / own.sum().clamp(min=1) for name, own in counts.items()}


@dataclass(frozen=True)
class _Loads:
    counts: Counts

    def merge(self, other: Any) -> Self:
        return type(self)(together(self.counts, other.counts))

    def value(self) -> float | None:
        chosen = {name: own for name, own in self.counts.items() if own.any()}
        return self.of(chosen) if chosen else None

    def of(self, counts: Counts) -> float:
        """Compute the metric of layers that have choices."""
        raise NotImplementedError


class LargestShare(_Loads):
    """The largest share of a layer's choices that one expert has, of all layers."""

    def of(self, counts: Counts) -> float:
        return max(float(own.max()) for own in shares_of(counts).values())


class LoadEntropy(_Loads):
    """The entropy of the shares over that of even shares, the mean over layers: 1 where all experts have as much."""

    def of(self, counts: Counts) -> float:
        found = [
            float(torch.special.entr(own).sum()) / math.log(max(len(own), 2)) for own in shares_of(counts).values()
        ]
        return sum(found) / len(found)


class DeadExperts(_Loads):
    """The number of experts that no token chose, in all layers."""

    def of(self, counts: Counts) -> float:
        return float(sum(int((own == 0).sum()) for own in counts.values()))


LOADS: Mapping[str, type[_Loads]] = {
    "largest_expert_share": LargestShare,
    "expert_load_entropy": LoadEntropy,
    "dead_experts": DeadExperts,
}
