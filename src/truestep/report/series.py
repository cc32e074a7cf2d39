"""The points of a chart, thinned out without losing their extremes, or smoothed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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


def downsample(points: Sequence[Point], limit: int = LONGEST_SERIES, buckets: int = BUCKETS) -> list[Point]:
    """Keep the smallest and the largest of each bucket, the first gap in it, and both ends."""
    if len(points) <= limit:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        indices = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        present = [(value, index) for index in indices if (value := points[index].value) is not None]
        if present:
            kept.update((min(present)[1], max(present)[1]))
        kept.update([index for index in indices if points[index].value is None][:1])
    return [points[index] for index in sorted(kept)]


def smooth(points: Sequence[Point], *, logarithmic: bool = False, outputs: int = BUCKETS) -> list[Point]:
    """Take a centred mean with weights falling off linearly, at no more than `outputs` points; gaps stay gaps."""
    half = max(3, len(points) // 40)
    count = min(outputs, len(points))
    chosen = sorted({index * (len(points) - 1) // max(1, count - 1) for index in range(count)})
    return [replace(points[index], value=_local_mean(points, index, half, logarithmic)) for index in chosen]


def _local_mean(points: Sequence[Point], centre: int, half: int, logarithmic: bool) -> float | None:
    if points[centre].value is None:
        return None
    total = weights = 0.0
    for index in range(max(0, centre - half), min(len(points), centre + half + 1)):
        value = points[index].value
        # The mean of a logarithmic axis is geometric, or one spike would lift the whole line.
        if value is None or (logarithmic and value <= 0):
            continue
        weight = half + 1 - abs(index - centre)
        total += weight * (math.log(value) if logarithmic else value)
        weights += weight
    if not weights:
        return points[centre].value
    mean = math.exp(total / weights) if logarithmic else total / weights
    return mean if math.isfinite(mean) else None
