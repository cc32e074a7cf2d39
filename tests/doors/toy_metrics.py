"""Metrics as a user would write them, outside the package, one of them of a new kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from truestep.losses.labels import Labels
from truestep.losses.measure import StepFacts
from truestep.metrics.types import Metric, Sum


@dataclass(frozen=True)
class Spread:
    """The standard deviation of values, merged by their count, sum and sum of squares."""

    count: torch.Tensor | float
    total: torch.Tensor | float
    squares: torch.Tensor | float

    def merge(self, other: Spread) -> Spread:
        return Spread(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def value(self) -> float | None:
        count = float(self.count)
        if not count:
            return None
        mean = float(self.total) / count
        return max(0.0, float(self.squares) / count - mean * mean) ** 0.5


def surprise(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """How unevenly likely the labels are, and how many of them have a positive advantage."""
    values = labels.logprobs.double()
    positive = (labels.advantages > 0) & labels.has_label("advantages")
    return {
        "logprob_spread": Spread(values.new_tensor(len(values)), values.sum(), values.square().sum()),
        "positive_labels": Sum(positive.sum()),
    }


def unsteady(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """How far log-ratios are apart."""
    values = labels.log_ratio.double()
    return {"ratio_spread": Spread(values.new_tensor(len(values)), values.sum(), values.square().sum())}


@dataclass(frozen=True)
class Largest:
    """A maximum of a kind that is not built in."""

    largest: float

    def merge(self, other: Largest) -> Largest:
        return Largest(max(self.largest, other.largest))

    def value(self) -> float | None:
        return self.largest


def farthest(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """The largest log-ratio."""
    return {"farthest_label": Largest(max(map(float, labels.log_ratio.abs()), default=0.0))}


def clash(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    return {"loss": Sum(0.0)}


def planted_count(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """Wrong on purpose: it counts micro-batches, so it depends on the layout."""
    return {"micro_batches_seen": Sum(1.0)}


def weights(labels: Labels, step: StepFacts) -> dict[str, Metric]:
    """The sum of a user's own weights over the labels."""
    return {"weights": Sum(labels.fields["my_weight"].double().sum())}
