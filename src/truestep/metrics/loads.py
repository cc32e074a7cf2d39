"""Metrics that say how evenly the routers spread a step's tokens over experts, from counts of choices in each layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

Counts = Mapping[str, torch.Tensor]  # for each layer, how often each of its E experts was chosen, [E]


def together(first: Counts, second: Counts) -> dict[str, torch.Tensor]:
    """Add up the counts of two parts of a step. Each may have layers that the other lacks."""
    return {**first, **second, **{name: first[name] + second[name] for name in first.keys() & second.keys()}}


def shares_of(counts: Counts) -> dict[str, torch.Tensor]:
    """Return each expert's share of its layer's choices, in float64; 0 if the layer has no choices."""
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
        """Compute the metric from the layers that have choices."""
        raise NotImplementedError


class LargestShare(_Loads):
    """The largest share of a layer's choices that goes to one expert; the maximum over layers."""

    def of(self, counts: Counts) -> float:
        return max(float(own.max()) for own in shares_of(counts).values())


class LoadEntropy(_Loads):
    """The entropy of the experts' shares divided by that of equal shares, averaged over layers. It is 1 if all shares
    are equal."""

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
