"""The points of a line. For the page, a long line is reduced to the extremes and the means of consecutive parts of the
run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

Axis = Literal["documents", "step", "clock"]

# A series longer than this is thinned.
LONGEST_SERIES = 1000
BUCKETS = 300


@dataclass(frozen=True, eq=False)
class Series:
    """The points of a line."""

    steps: np.ndarray  # [P] float64, increasing
    documents: np.ndarray  # [P] documents seen; NaN if unknown
    values: np.ndarray  # [P] NaN where the run wrote null, NaN or an infinity: the line has a gap there

    def __len__(self) -> int:
        return len(self.steps)

    def chosen(self, indices: Sequence[int] | np.ndarray) -> "Series":
        """Return the points at some indices."""
        return Series(self.steps[indices], self.documents[indices], self.values[indices])

    @cached_property
    def thinned(self) -> "Series":
        """The points that are drawn: all points of a short line, a selection of a long one."""
        return downsample(self)

    @cached_property
    def means(self) -> "Series":
        """The means of a long line over buckets, each at the middle of its bucket."""
        return bucket_means(self)

    @property
    def present(self) -> np.ndarray:
        """The values without the gaps."""
        return self.values[~np.isnan(self.values)]

    @property
    def gaps(self) -> np.ndarray:
        """The steps without a finite value."""
        return self.steps[np.isnan(self.values)]

    @cached_property
    def extremes(self) -> list[float]:
        """The smallest, the largest and the smallest positive value, which determine the axis."""
        present = self.present
        if not len(present):
            return []
        positive = present[present > 0]
        return [float(present.min()), float(present.max()), *([float(positive.min())] if len(positive) else [])]


def downsample(series: Series, limit: int = LONGEST_SERIES, buckets: int = BUCKETS) -> Series:
    """Keep the smallest value, the largest value and the first gap of each bucket, and both ends of the series."""
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
            # Among equal values, take the first as the smallest and the last as the largest.
            kept.update((start + int(low[start:end].argmin()), end - 1 - int(high[start:end][::-1].argmax())))
        if gaps and gap[start:end].any():
            kept.add(start + int(gap[start:end].argmax()))
    return series.chosen(sorted(kept))


def bucket_means(series: Series, limit: int = LONGEST_SERIES, buckets: int = BUCKETS) -> Series:
    """Compute the mean of each bucket of a long series; NaN for a bucket without values."""
    count = len(series)
    if count <= limit:
        return series
    bounds = np.arange(buckets + 1) * count // buckets
    there = ~np.isnan(series.values)
    # Divide before adding, so that very large values do not overflow.
    sizes = np.add.reduceat(there.astype(np.float64), bounds[:-1])
    shares = np.where(there, series.values, 0.0) / np.repeat(np.maximum(sizes, 1), np.diff(bounds))
    means = np.where(sizes > 0, np.add.reduceat(shares, bounds[:-1]), np.nan)
    middle = series.chosen((bounds[:-1] + bounds[1:]) // 2)
    return Series(middle.steps, middle.documents, means)
