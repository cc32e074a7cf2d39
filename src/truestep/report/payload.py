"""The data from which the page's script draws the charts.

The x coordinates (step, documents seen, seconds) are stored once per run, in a table of all steps that any line of the
run has. A line refers to a list of rows of this table; lines with the same steps share a list.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from truestep.report.charts import Chart, Line
from truestep.report.generations import begun_after
from truestep.report.runs import Run
from truestep.report.series import Axis, Series
from truestep.report.tables import Table

AXES: dict[Axis, tuple[str, str]] = {
    "documents": ("Documents", "documents seen"),
    "step": ("Steps", "step"),
    "clock": ("Time", "time in steps, evaluations and saves"),
}
# The script's arithmetic does not overflow within these bounds. Values outside them are clamped.
LARGEST, SMALLEST = 1e30, 1e-30


class Payload:
    """The charts of a page, in the format of the script."""

    def __init__(self, runs: Sequence[Run], charts: Sequence[Chart]) -> None:
        self._runs = runs
        self._tables = [table for run in runs for table in (run.metrics, run.evaluations)]
        self._axes = [_places(run, table) for run in runs for table in (run.metrics, run.evaluations)]
        self._numbers = {id(table): number for number, table in enumerate(self._tables)}
        self._lists: dict[tuple[int, bytes], int] = {}
        self._steps: list[tuple[int, np.ndarray]] = []
        self._charts = [self._chart(chart) for chart in charts]
        self.axes = [axis for axis in AXES if any(self._has(axis, table) for table, _ in self._steps)]

    def _has(self, axis: Axis, table: int) -> bool:
        return bool(np.isfinite(self._axes[table][axis]).any())

    def value(self) -> dict[str, Any]:
        """Return the data as JSON. A list of positions contains indices into the rows of one of the page's tables."""
        rows: dict[int, list[np.ndarray]] = {}
        for table, steps in self._steps:
            rows.setdefault(table, []).append(np.searchsorted(self._tables[table].steps, steps))
        kept = {table: np.unique(np.concatenate(lists)) for table, lists in rows.items()}
        places = []
        for table, steps in self._steps:
            at = np.searchsorted(kept[table], np.searchsorted(self._tables[table].steps, steps))
            whole = len(at) == len(kept[table])
            places.append([table, None if whole else at.tolist()])
        tables: list[dict[str, Any] | None] = [None] * len(self._tables)
        for table, among in kept.items():
            tables[table] = {
                axis: [_short(place, 12) for place in self._axes[table][axis][among].tolist()] for axis in self.axes
            }
        axes = [{"name": axis, "button": AXES[axis][0], "title": AXES[axis][1]} for axis in self.axes]
        return {"axes": axes, "tables": tables, "places": places, "charts": self._charts, "marks": self._marks()}

    def _marks(self) -> dict[str, list[float | int | None]]:
        """Return where generations begin on each axis, on a page of one run."""
        if len(self._runs) > 1:
            return {}
        run, found = self._runs[0], dict[str, list[float | int | None]]()
        steps = begun_after(run)
        rows = np.flatnonzero(np.isin(run.metrics.steps, steps))
        for axis in self.axes:
            at = self._axes[0][axis][rows]
            start = [0] if 0.0 in steps else []  # the run began again from the first step
            found[axis] = [*start, *(_short(place, 12) for place in at.tolist() if place == place)]
        return found

    def _chart(self, chart: Chart) -> dict[str, Any]:
        spec = chart.spec
        return {
            "title": chart.title,
            "lines": [
                self._line(line) | {"below": chart.lines[chart.below[number]].name if number in chart.below else None}
                for number, line in enumerate(chart.lines)
            ],
            "reference": spec.reference,
            "least": spec.least_range,
            "zero": spec.from_zero,
            "log": chart.logarithmic,
            "smooth": spec.smoothed and not spec.from_evaluation,
            "stacked": spec.stacked,
        }

    def _line(self, line: Line) -> dict[str, Any]:
        thin = line.points.thinned
        entry: dict[str, Any] = {
            "name": line.name,
            "colour": line.colour,
            "dashed": line.dashed,
            "count": len(line.points),
            "at": self._list(line.table, thin),
            "values": _values(thin),
        }
        if thin is not line.points:
            entry |= {"meansAt": self._list(line.table, line.points.means), "means": _values(line.points.means)}
        return entry

    def _list(self, table: Table, points: Series) -> int:
        number = self._numbers[id(table)]
        key = (number, points.steps.tobytes())
        if key not in self._lists:
            self._lists[key] = len(self._steps)
            self._steps.append((number, points.steps))
        return self._lists[key]


def _places(run: Run, table: Table) -> dict[Axis, np.ndarray]:
    """Return the coordinate of each record of a table on each axis; NaN if unknown."""
    return {"documents": run.documents_seen(table), "step": table.steps, "clock": run.seconds_by(table)}


def _values(points: Series) -> list[float | int | None]:
    return [_short(value) for value in points.values.tolist()]


def _short(value: float, digits: int = 6) -> float | int | None:
    """Round a number to `digits` significant digits. This halves the size of the page."""
    if value != value:
        return None
    if abs(value) < SMALLEST:
        return 0
    value = min(max(value, -LARGEST), LARGEST)
    return int(value) if abs(value) < 1e15 and value == int(value) else float(f"{value:.{digits}g}")
