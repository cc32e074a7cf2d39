"""Line charts, and their lines as SVG."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from truestep.report.scale import Scale, linear_scale, logarithmic_scale, wants_logarithm
from truestep.report.series import LONGEST_PLAIN_SERIES, Axis, Series

# The coordinates of a plot, stretched to whatever room it gets.
EXTENT = 1000
AXIS_LABELS: dict[Axis, str] = {"documents": "documents seen", "step": "step"}
# A series no longer than this gets a dot for each point.
LONGEST_DOTTED_SERIES = 30


@dataclass(frozen=True)
class Line:
    """A series of a chart. `colour` counts through the palette; `dashed` tells a second metric of a run apart."""

    name: str
    colour: int
    points: Series
    dashed: bool = False


@dataclass(frozen=True)
class Plan:
    """A chart before it has data: its metrics by key, with the names they get there, and how it is drawn."""

    title: str
    metrics: Mapping[str, str]
    unit: str = ""
    from_evaluation: bool = False
    # Several runs are compared by one metric a chart: by the first only, or by each in a chart of its own.
    compare_each: bool = False
    from_zero: bool = False
    logarithmic_if_wide: bool = False
    reference: float | None = None
    # The least range of the vertical axis, so that rounding is not blown up to a mountain range.
    least_range: float = 0.0
    # A metric that follows a schedule has no noise to smooth away.
    smoothed: bool = True
    # The chart a run is judged by gets the most room; among several runs there are several of it.
    wide: bool = False


@dataclass(frozen=True)
class Chart:
    """A plan with the lines that it shows."""

    plan: Plan
    title: str
    lines: Sequence[Line]
    wide: bool = False

    @property
    def extremes(self) -> list[float]:
        """All that the vertical axis depends on: the smallest and the largest values, and the smallest positive."""
        return [value for line in self.lines for value in line.points.extremes]


def vertical_scale(chart: Chart) -> Scale:
    """Choose the vertical axis by the values and the plan."""
    plan, values = chart.plan, chart.extremes
    if plan.logarithmic_if_wide and wants_logarithm(values):
        return logarithmic_scale(values)
    if plan.reference is not None:
        values.append(plan.reference)
    if values and plan.from_zero and min(values) >= 0:
        values.append(0.0)
    if values and max(values) - min(values) < plan.least_range:
        middle = plan.reference if plan.reference is not None else (max(values) + min(values)) / 2
        values += [middle - plan.least_range, middle + plan.least_range]
    return linear_scale(values)


def horizontal_scales(charts: Sequence[Chart]) -> dict[Axis, Scale]:
    """Make one horizontal axis of each kind for all charts, so that they can be read one under the other.

    An axis on which no point has a place is left out.
    """
    series = [line.points for chart in charts for line in chart.lines]
    scales: dict[Axis, Scale] = {}
    for axis in AXIS_LABELS:
        placed = [places for one in series if len(places := one.placed(axis).along(axis))]
        if placed:
            ends = [float(end) for places in placed for end in (places.min(), places.max())]
            scales[axis] = linear_scale(ends, count=6, snap=False, whole=True)
    return scales


def plot_svg(chart: Chart, axis: Axis, horizontal: Scale, vertical: Scale, label: str) -> str:
    """Draw the grid and the lines without any text; the plot stretches to its room, the strokes do not."""
    parts = [
        f'<svg class="area" viewBox="0 0 {EXTENT} {EXTENT}" preserveAspectRatio="none" role="img" aria-label="{label}">'
    ]
    rows = " ".join(f"M0 {_height(vertical, tick)}H{EXTENT}" for tick in vertical.ticks)
    parts.append(f'<path class="grid" d="{rows}"/>')
    reference = chart.plan.reference
    if reference is not None and vertical.low <= reference <= vertical.high and not vertical.logarithmic:
        parts.append(f'<path class="reference" d="M0 {_height(vertical, reference)}H{EXTENT}"/>')
    # Either all lines of a chart have dots or none has; but a single point can only be seen as a dot.
    dotted = all(len(line.points) <= LONGEST_DOTTED_SERIES for line in chart.lines)
    for line in chart.lines:
        dots = dotted or len(line.points) == 1
        parts += _line_paths(line, axis, horizontal, vertical, smoothed=chart.plan.smoothed, dotted=dots)
    return "".join([*parts, "</svg>"])


def _line_paths(
    line: Line, axis: Axis, horizontal: Scale, vertical: Scale, *, smoothed: bool, dotted: bool
) -> Iterator[str]:
    """Draw a line, or a faint line under a smoothed one where it is long; add dots where there are few points."""
    points = line.points.placed(axis)
    style = f"line colour-{line.colour}" + (" dashed" if line.dashed else "")
    if smoothed and len(points) > LONGEST_PLAIN_SERIES:
        faint = _path_data(points.thinned, axis, horizontal, vertical)
        yield f'<path class="line colour-{line.colour} faint" d="{faint}"/>'
        means = points.smoothed_for_logarithms if vertical.logarithmic else points.smoothed
        yield f'<path class="{style}" d="{_path_data(means, axis, horizontal, vertical)}"/>'
    elif len(points):
        yield f'<path class="{style}" d="{_path_data(points.thinned, axis, horizontal, vertical)}"/>'
    if dotted:
        # A stroke of no length with round ends is a dot that stays round however the plot is stretched.
        dots = "".join(f"M{place}h0" for place in _places(points, axis, horizontal, vertical) if place)
        if dots:
            yield f'<path class="dots colour-{line.colour}" d="{dots}"/>'


def _path_data(points: Series, axis: Axis, horizontal: Scale, vertical: Scale) -> str:
    """Write the data of a path with a gap at each point without a value."""
    path = ""
    for has_value, group in groupby(_places(points, axis, horizontal, vertical), key=bool):
        if has_value:
            places = list(group)
            path += "M" + "L".join(places)
            # A point between two gaps would be invisible.
            path += "h0" if len(places) == 1 else ""
    return path


def _places(points: Series, axis: Axis, horizontal: Scale, vertical: Scale) -> list[str]:
    """Write where each point lies, as `x y`; nothing for a gap."""
    rows = zip(horizontal.positions(points.along(axis)), vertical.positions(points.values), strict=True)
    return [f"{_compact(EXTENT * x)} {_compact(EXTENT * (1 - y))}" if y == y else "" for x, y in rows]


def _height(vertical: Scale, value: float) -> str:
    return _compact(EXTENT * (1 - vertical.position(value)))


def _compact(value: float) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
