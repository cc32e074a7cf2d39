"""The points of a chart, thinned out without losing their extremes, or smoothed."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np

Axis = Literal["documents", "step"]

# A series longer than this is thinned out.
LONGEST_SERIES = 1000
# A series longer than this is drawn faint, with a smoothed line over it.
LONGEST_PLAIN_SERIES = 60
BUCKETS = 300


@dataclass(frozen=True)
class Point:
    """A value at a step. `value` is None where the run wrote null, NaN or an infinity: the line has a gap there."""

    step: float
    documents: float | None
    value: float | None

    def along(self, axis: Axis) -> float | None:
        return self.documents if axis == "documents" else self.step


@dataclass(frozen=True, eq=False)
class Series:
    """Many points, as arrays. NaN stands for None."""

    steps: np.ndarray  # [P] float64, growing
    documents: np.ndarray  # [P]
    values: np.ndarray  # [P]

    @classmethod
    def of(cls, points: Sequence[Point]) -> Self:
        def array(values: Iterable[float | None]) -> np.ndarray:
            return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

        return cls(
            array(point.step for point in points),
            array(point.documents for point in points),
            array(point.value for point in points),
        )

    def __len__(self) -> int:
        return len(self.steps)

    def along(self, axis: Axis) -> np.ndarray:
        return self.documents if axis == "documents" else self.steps

    def placed(self, axis: Axis) -> "Series":
        """Leave out the points that have no place on an axis."""
        there = ~np.isnan(self.along(axis))
        return self if there.all() else Series(self.steps[there], self.documents[there], self.values[there])

    def chosen(self, indices: Sequence[int]) -> "Series":
        """Give the points of some indices."""
        return Series(self.steps[indices], self.documents[indices], self.values[indices])

    def points(self) -> list[Point]:
        """Give single points."""
        rows = zip(self.steps.tolist(), self.documents.tolist(), self.values.tolist(), strict=True)
        return [Point(step, _some(documents), _some(value)) for step, documents, value in rows]

    # A chart is drawn over two axes and has a read-out: what they share is found once.
    @cached_property
    def thinned(self) -> "Series":
        """The points that a long line keeps."""
        return downsample(self)

    @cached_property
    def smoothed(self) -> "Series":
        """The means that are drawn over a long line."""
        return smooth(self)

    @cached_property
    def smoothed_for_logarithms(self) -> "Series":
        """The geometric means that are drawn over a long line on a logarithmic axis."""
        return smooth(self, logarithmic=True)

    @property
    def present(self) -> np.ndarray:
        """The values without the gaps."""
        return self.values[~np.isnan(self.values)]

    @property
    def gaps(self) -> np.ndarray:
        """The steps that have a gap instead of a value."""
        return self.steps[np.isnan(self.values)]

    @cached_property
    def extremes(self) -> list[float]:
        """The smallest, the largest and the smallest positive value: all that an axis depends on."""
        present = self.present
        if not len(present):
            return []
        positive = present[present > 0]
        return [float(present.min()), float(present.max()), *([float(positive.min())] if len(positive) else [])]


def _some(value: float) -> float | None:
    return None if math.isnan(value) else value


def downsample(series: Series, limit: int = LONGEST_SERIES, buckets: int = BUCKETS) -> Series:
    """Keep the smallest and the largest of each bucket, the first gap in it, and both ends."""
    count = len(series)
    if count <= limit:
        return series
    gap = np.isnan(series.values)
    gaps = bool(gap.any())
    low, high = (np.where(gap, end, series.values) if gaps else series.values for end in (np.inf, -np.inf))
    kept = {0, count - 1}
    for bucket in range(buckets):
        start, end = bucket * count // buckets, (bucket + 1) * count // buckets
        if not gaps or not gap[start:end].all():
            # Of equal values the first is the smallest, and the last the largest.
            kept.update((start + int(low[start:end].argmin()), end - 1 - int(high[start:end][::-1].argmax())))
        if gaps and gap[start:end].any():
            kept.add(start + int(gap[start:end].argmax()))
    return series.chosen(sorted(kept))


def smooth(series: Series, *, logarithmic: bool = False, outputs: int = BUCKETS) -> Series:
    """Take a centred mean with weights falling off linearly, at no more than `outputs` points; gaps stay gaps."""
    half = max(3, len(series) // 40)
    count = min(outputs, len(series))
    chosen = sorted({index * (len(series) - 1) // max(1, count - 1) for index in range(count)})
    used = ~np.isnan(series.values)
    if logarithmic:  # the mean of a logarithmic axis is geometric, or one spike would lift the whole line
        used &= series.values > 0
    levels = np.where(used, series.values, 1.0 if logarithmic else 0.0)
    levels = np.log(levels) if logarithmic else levels
    ramp = half + 1.0 - np.abs(np.arange(-half, half + 1))
    means = [_local_mean(series.values, levels, used, index, ramp, logarithmic) for index in chosen]
    thin = series.chosen(chosen)
    return Series(thin.steps, thin.documents, np.array(means, dtype=np.float64))


def _local_mean(
    values: np.ndarray, levels: np.ndarray, used: np.ndarray, centre: int, ramp: np.ndarray, logarithmic: bool
) -> float:
    """Take the mean around one point; NaN for a gap."""
    if math.isnan(values[centre]):
        return math.nan
    half = len(ramp) // 2
    first, end = max(0, centre - half), min(len(values), centre + half + 1)
    weights = ramp[first - centre + half : end - centre + half] * used[first:end]
    total = float(weights.sum())
    if not total:
        return float(values[centre])
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float((weights * levels[first:end]).sum()) / total
    mean = math.exp(mean) if logarithmic else mean
    return mean if math.isfinite(mean) else math.nan
