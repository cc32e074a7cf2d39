"""Line charts as SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from truestep.report.scale import Scale, linear_scale, logarithmic_scale, wants_logarithm
from truestep.report.series import LONGEST_PLAIN_SERIES, Axis, Point, downsample, smooth

# The coordinates of a plot, stretched to whatever room it gets.
EXTENT = 1000
# With no more points than this each one gets a dot.
LONGEST_DOTTED_SERIES = 30


@dataclass(frozen=True)
class Line:
    """A series of a chart. `colour` counts through the palette; `dashed` tells a second metric of a run apart."""

    name: str
    colour: int
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """What a chart shows, and how its vertical axis is chosen."""

    title: str
    unit: str
    lines: Sequence[Line]
    from_zero: bool = False
    logarithmic_if_wide: bool = False
    reference: float | None = None
    # The least range of the vertical axis, so that rounding is not blown up to a mountain range.
    least_range: float = 0.0
    smoothed: bool = True
    wide: bool = False

    def values(self) -> list[float]:
        return [point.value for line in self.lines for point in line.points if point.value is not None]


def vertical_scale(chart: Chart) -> Scale:
    values = chart.values()
    if chart.logarithmic_if_wide and wants_logarithm(values):
        return logarithmic_scale(values)
    if chart.reference is not None:
        values.append(chart.reference)
    if values and chart.from_zero and min(values) >= 0:
        values.append(0.0)
    if values and max(values) - min(values) < chart.least_range:
        middle = chart.reference if chart.reference is not None else (max(values) + min(values)) / 2
        values += [middle - chart.least_range, middle + chart.least_range]
    return linear_scale(values)


def horizontal_scale(lines: Sequence[Line], axis: Axis) -> Scale | None:
    """The range of an axis over the lines of one or of many charts, None where no point has a place on it."""
    places = [place for line in lines for point in line.points if (place := point.along(axis)) is not None]
    return linear_scale(places, count=6, snap=False, whole=True) if places else None


def plot_svg(chart: Chart, axis: Axis, horizontal: Scale, vertical: Scale, label: str = "") -> str:
    """The grid and the lines without any text, stretched to the room there is without stretching the strokes."""
    parts = [
        f'<svg class="area" viewBox="0 0 {EXTENT} {EXTENT}" preserveAspectRatio="none" role="img" aria-label="{label}">'
    ]
    rows = " ".join(f"M0 {_height(vertical, tick)}H{EXTENT}" for tick in vertical.ticks)
    parts.append(f'<path class="grid" d="{rows}"/>')
    if chart.reference is not None and vertical.low <= chart.reference <= vertical.high and not vertical.logarithmic:
        parts.append(f'<path class="reference" d="M0 {_height(vertical, chart.reference)}H{EXTENT}"/>')
    # All lines of a chart have dots or none has, save for a single point, which is nothing without one.
    dotted = all(len(line.points) <= LONGEST_DOTTED_SERIES for line in chart.lines)
    for line in chart.lines:
        dots = dotted or len(line.points) == 1
        parts += line_paths(line, axis, horizontal, vertical, smoothed=chart.smoothed, dotted=dots)
    parts.append("</svg>")
    return "".join(parts)


def line_paths(
    line: Line, axis: Axis, horizontal: Scale, vertical: Scale, *, smoothed: bool, dotted: bool
) -> Iterator[str]:
    """A line, or where it is long a faint one under a smoothed one; dots where there are few points."""
    points = [point for point in line.points if point.along(axis) is not None]
    style = f"line colour-{line.colour}" + (" dashed" if line.dashed else "")
    if smoothed and len(points) > LONGEST_PLAIN_SERIES:
        faint = path_data(downsample(points), axis, horizontal, vertical)
        yield f'<path class="line colour-{line.colour} faint" d="{faint}"/>'
        mean = path_data(smooth(points, logarithmic=vertical.logarithmic), axis, horizontal, vertical)
        yield f'<path class="{style}" d="{mean}"/>'
    elif points:
        yield f'<path class="{style}" d="{path_data(downsample(points), axis, horizontal, vertical)}"/>'
    if dotted:
        # A stroke of no length with round ends is a dot that stays round however the plot is stretched.
        places = (_place(point, axis, horizontal, vertical) for point in points if point.value is not None)
        dots = "".join(f"M{x} {y}h0" for x, y in places)
        if dots:
            yield f'<path class="dots colour-{line.colour}" d="{dots}"/>'


def path_data(points: Sequence[Point], axis: Axis, horizontal: Scale, vertical: Scale) -> str:
    """The data of a path with a gap at each point without a value."""
    parts, pen_down = [], False
    for index, point in enumerate(points):
        if point.value is None:
            pen_down = False
            continue
        x, y = _place(point, axis, horizontal, vertical)
        parts.append(f"{'L' if pen_down else 'M'}{x} {y}")
        alone = not pen_down and (index + 1 == len(points) or points[index + 1].value is None)
        if alone:
            # A point between two gaps would be invisible.
            parts.append("h0")
        pen_down = True
    return "".join(parts)


def _place(point: Point, axis: Axis, horizontal: Scale, vertical: Scale) -> tuple[str, str]:
    """Where a point is; only points with a value and a place on the axis come here."""
    along, value = point.along(axis), point.value
    assert along is not None
    assert value is not None
    return _compact(EXTENT * horizontal.position(along)), _height(vertical, value)


def _height(vertical: Scale, value: float) -> str:
    return _compact(EXTENT * (1 - vertical.position(value)))


def _compact(value: float) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
