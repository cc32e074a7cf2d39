"""Metrics whose type says how they are reduced: over micro-batches, ranks, chunks and logging intervals alike.

A mean is a total and a count until it is read, so nothing is ever a mean of means. `value()` is None where there was
nothing to measure, and such a metric is absent from what is logged.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, Self

import torch


class Metric(Protocol):
    """A dataclass of numbers, tensors and tuples of these that knows how two of its kind are reduced to one."""

    def merge(self, other: Any) -> Self: ...

    def value(self) -> float | None:
        """The number to log; None where nothing was measured."""
        ...


def _double(value: torch.Tensor | float) -> torch.Tensor:
    """Convert to float64: an extreme is one of the values, to the last digit."""
    return torch.as_tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class Sum:
    total: torch.Tensor | float

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        return float(self.total)


@dataclass(frozen=True)
class Mean:
    total: torch.Tensor | float
    count: torch.Tensor | float

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return float(self.total) / float(self.count) if self.count else None


@dataclass(frozen=True)
class Max:
    """The largest of some values; -inf stands for none."""

    largest: torch.Tensor | float

    def merge(self, other: "Max") -> "Max":
        # Not Python's max(): it drops a NaN or keeps it depending on the order of its arguments.
        return Max(torch.maximum(_double(self.largest), _double(other.largest)))

    def value(self) -> float | None:
        return None if self.largest == -math.inf else float(self.largest)


@dataclass(frozen=True)
class Min:
    """The smallest of some values; +inf stands for none."""

    smallest: torch.Tensor | float

    def merge(self, other: "Min") -> "Min":
        return Min(torch.minimum(_double(self.smallest), _double(other.smallest)))

    def value(self) -> float | None:
        return None if self.smallest == math.inf else float(self.smallest)


@dataclass(frozen=True)
class Derived:
    """A function of sums, applied after every reduction of them."""

    parts: "tuple[Sum, ...]"
    function: Callable[..., float | None]

    def merge(self, other: "Derived") -> "Derived":
        parts = zip(self.parts, other.parts, strict=True)
        return Derived(tuple(first.merge(second) for first, second in parts), self.function)

    def value(self) -> float | None:
        return self.function(*(part.value() for part in self.parts))


@dataclass(frozen=True)
class Histogram:
    """Counts between fixed edges. `value()` is a percentile, interpolated within its bin."""

    counts: torch.Tensor  # [edges + 1]: below the first edge, between edges, above the last
    edges: torch.Tensor  # ascending
    percentile: float

    @staticmethod
    def of(values: torch.Tensor, edges: torch.Tensor, percentile: float) -> "Histogram":
        bins = torch.bucketize(values, edges.to(values))
        return Histogram(torch.bincount(bins, minlength=len(edges) + 1).double(), edges.double(), percentile)

    def merge(self, other: "Histogram") -> "Histogram":
        return Histogram(self.counts + other.counts, self.edges, self.percentile)

    def value(self) -> float | None:
        total = float(self.counts.sum())
        if not total:
            return None
        target = self.percentile / 100 * total
        cumulative = self.counts.cumsum(0)
        index = int(torch.searchsorted(cumulative, cumulative.new_tensor(target)))
        # The outermost bins are open: their one known edge is all that can be said.
        if index == 0:
            return float(self.edges[0])
        if index >= len(self.edges):
            return float(self.edges[-1])
        low, high = float(self.edges[index - 1]), float(self.edges[index])
        return low + (high - low) * (target - float(cumulative[index - 1])) / float(self.counts[index])


def merge(first: Mapping[str, Metric], second: Mapping[str, Metric]) -> dict[str, Metric]:
    """Unite two sets of metrics. A metric that both have is reduced as its type says."""
    merged = dict(first)
    for name, metric in second.items():
        merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def on_host(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Move every number to the host, where ranks exchange them."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu()
        if isinstance(value, tuple):
            return tuple(moved(part) for part in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{item.name: moved(getattr(value, item.name)) for item in fields(value)})
        return value

    return {name: moved(metric) for name, metric in metrics.items()}


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Read the numbers to log. A metric that measured nothing is absent."""
    read = {name: metric.value() for name, metric in metrics.items()}
    return {name: value for name, value in read.items() if value is not None}
