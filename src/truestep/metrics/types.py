"""Types of metrics. The type defines the reduction, which is the same over micro-batches, ranks, chunks and intervals.

A mean is stored as a total and a count, so that no mean of means is computed. `value()` is None if nothing was
measured; such a metric is not logged.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, Self

import torch


class Metric(Protocol):
    """A dataclass of numbers, tensors and tuples of these; `merge` reduces two metrics of one type to one."""

    def merge(self, other: Any) -> Self: ...

    def value(self) -> float | None:
        """Return the number to log; None if nothing was measured."""
        ...


def _double(value: torch.Tensor | float) -> torch.Tensor:
    """Convert to float64, which holds every float32 and integer up to 2**53 exactly."""
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
    """The largest of some values; -inf if there are none."""

    largest: torch.Tensor | float

    def merge(self, other: "Max") -> "Max":
        # Not Python's max(), which keeps or drops a NaN depending on the order of its arguments.
        return Max(torch.maximum(_double(self.largest), _double(other.largest)))

    def value(self) -> float | None:
        return None if self.largest == -math.inf else float(self.largest)


@dataclass(frozen=True)
class Min:
    """The smallest of some values; +inf if there are none."""

    smallest: torch.Tensor | float

    def merge(self, other: "Min") -> "Min":
        return Min(torch.minimum(_double(self.smallest), _double(other.smallest)))

    def value(self) -> float | None:
        return None if self.smallest == math.inf else float(self.smallest)


@dataclass(frozen=True)
class Derived:
    """A function of sums, applied when the value is read, after the sums are reduced."""

    parts: "tuple[Sum, ...]"
    function: Callable[..., float | None]

    def merge(self, other: "Derived") -> "Derived":
        parts = zip(self.parts, other.parts, strict=True)
        return Derived(tuple(first.merge(second) for first, second in parts), self.function)

    def value(self) -> float | None:
        return self.function(*(part.value() for part in self.parts))


@dataclass(frozen=True)
class Histogram:
    """Counts of values between fixed edges. `value()` is a percentile, interpolated within its bin."""

    counts: torch.Tensor  # [edges + 1] counts: below the first edge, between edges, above the last edge
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
        # The outermost bins have only one edge: return it.
        if index == 0:
            return float(self.edges[0])
        if index >= len(self.edges):
            return float(self.edges[-1])
        low, high = float(self.edges[index - 1]), float(self.edges[index])
        return low + (high - low) * (target - float(cumulative[index - 1])) / float(self.counts[index])


def merge(first: Mapping[str, Metric], second: Mapping[str, Metric]) -> dict[str, Metric]:
    """Merge two sets of metrics by name."""
    merged = dict(first)
    for name, metric in second.items():
        merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def on_host(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Move all tensors to the host, where ranks exchange metrics."""
    return {name: _on_host(metric) for name, metric in metrics.items()}


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, tuple):
        return tuple(map(_on_host, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: _on_host(getattr(value, item.name)) for item in fields(value)})
    return value


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers to log, without metrics that measured nothing."""
    read = {name: metric.value() for name, metric in metrics.items()}
    return {name: value for name, value in read.items() if value is not None}
