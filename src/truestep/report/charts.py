"""The charts of a page: their lines, and which lines are constant or hidden behind others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from truestep.report.chart_specs import ChartSpec
from truestep.report.formats import format_number
from truestep.report.runs import Run
from truestep.report.series import Series
from truestep.report.style import COLOURS
from truestep.report.tables import Table

# Two lines look like one if they differ by less than this fraction of the chart's range.
_SAME = 0.004
# A chart may get a logarithmic axis if its largest value is more than this factor times its smallest.
_LOGARITHMIC_FACTOR = 100.0


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart. `colour` is an index into the palette; `dashed` marks a second line of the same colour."""

    name: str
    colour: int
    points: Series
    table: Table  # the table that has the steps of the points
    dashed: bool = False


@dataclass(frozen=True, eq=False)
class Chart:
    """A spec with its lines."""

    spec: ChartSpec
    title: str
    lines: Sequence[Line]
    wide: bool = False
    # Maps the index of a hidden line to the index of the line that hides it.
    below: dict[int, int] = field(default_factory=dict)

    @property
    def extremes(self) -> list[float]:
        """The smallest, largest and smallest positive value of each line."""
        return [value for line in self.lines for value in line.points.extremes]

    @property
    def logarithmic(self) -> bool:
        return self.spec.logarithmic_if_wide and wants_logarithm(self.extremes)

    @cached_property
    def constant(self) -> str | None:
        """The chart's title and values as text, if all lines are constant; else None."""
        found = [_constant(line.points) for line in self.lines]
        if any(value is None for value in found):
            return None
        shown = [format_number(value).replace("-", "\N{MINUS SIGN}") for value in found]
        if len(set(shown)) == 1:
            return f"{self.title} {shown[0]}"
        return f"{self.title} " + ", ".join(
            f"{value} ({line.name})" for line, value in zip(self.lines, shown, strict=True)
        )

    @property
    def notes(self) -> list[str]:
        """Sentences about values that are not drawn: gaps, and zeros on a logarithmic axis."""
        gaps = sum(len(line.points.gaps) for line in self.lines)
        notes = [f"{gaps:,} {'value' if gaps == 1 else 'values'} not finite: gaps in the line."] if gaps else []
        if self.logarithmic and (zeros := sum(int((line.points.values == 0).sum()) for line in self.lines)):
            notes.append(f"{zeros:,} {'value' if zeros == 1 else 'values'} of 0 at the lower edge.")
        return notes


def wants_logarithm(values: Sequence[float]) -> bool:
    """Tell whether no value is negative and the positive values span more than a factor of 100."""
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if len(positive) < 2 or any(value < 0 for value in values):
        return False
    return math.log10(max(positive)) - math.log10(min(positive)) > math.log10(_LOGARITHMIC_FACTOR)


def _constant(points: Series) -> float | None:
    values = points.values
    if len(values) < 2 or np.isnan(values).any() or values.min() != values.max():
        return None
    return float(values[0])


def charts_of(spec: ChartSpec, runs: Sequence[Run]) -> list[Chart]:
    """Make the charts of a spec, without charts that have no values."""
    metrics = list(spec.metrics.items())
    if len(runs) == 1 or spec.stacked:
        # One chart per run, with a line per metric.
        candidates = [
            (
                f"{spec.title}, {run.name}" if len(runs) > 1 else spec.title,
                [_line(run, spec, key, name, index) for index, (key, name) in enumerate(metrics)],
            )
            for run in runs
        ]
    else:
        # One chart per metric, with a line per run.
        candidates = [
            (
                f"{spec.title}, {name}" if spec.compare_each and len(metrics) > 1 else spec.title,
                [_line(run, spec, key, run.name, index) for index, run in enumerate(runs)],
            )
            for key, name in (metrics if spec.compare_each else metrics[:1])
        ]
    charts = [_chart(spec, title, lines, len(runs)) for title, lines in candidates]
    return [chart for chart in charts if chart.extremes]


def _line(run: Run, spec: ChartSpec, key: str, name: str, index: int) -> Line:
    table = run.evaluations if spec.from_evaluation else run.metrics
    points = run.evaluation_points(key) if spec.from_evaluation else run.points(key)
    return Line(name, index % COLOURS, points, table, dashed=index >= COLOURS)


def _chart(spec: ChartSpec, title: str, lines: Sequence[Line], runs: int) -> Chart:
    shown = [line for line in lines if line.points.extremes]
    if spec.stacked:
        # Leave out parts that are 0 throughout.
        shown = [line for line in shown if line.points.present.any()]
        return Chart(spec, title, shown, wide=spec.wide)
    return Chart(spec, title, shown, wide=spec.wide and runs == 1, below=_below(shown))


def _below(lines: Sequence[Line]) -> dict[int, int]:
    """Find the lines that are hidden below a later line over their whole length."""
    values = [value for line in lines for value in line.points.extremes]
    reach = _SAME * (max(values) / 2 - min(values) / 2) * 2 if values else 0.0
    found: dict[int, int] = {}
    for first, line in enumerate(lines):
        for second in range(first + 1, len(lines)):
            other = lines[second].points
            here, there = _shared(line.points.steps, other.steps)
            # Compare the lines if they share at least 90 % of the shorter line's steps.
            if len(here) < max(1, 0.9 * min(len(line.points), len(other))):
                continue
            apart = np.abs(line.points.values[here] / 2 - other.values[there] / 2) * 2
            if first not in found and (np.isnan(apart) | (apart <= reach)).all():
                found[first] = second
    return found


def _shared(steps: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the common steps in both arrays."""
    if np.array_equal(steps, others):
        return (every := np.arange(len(steps))), every
    _, here, there = np.intersect1d(steps, others, assume_unique=True, return_indices=True)
    return here, there
