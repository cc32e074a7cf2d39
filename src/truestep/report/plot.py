"""The held-out reward as a stand-alone SVG file."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from truestep.files import write_text_whole
from truestep.report.drawing import LEGEND_LINE, MARGIN, WIDTH, Drawing
from truestep.report.runs import Run, read_runs
from truestep.report.scale import Scale, linear_scale
from truestep.report.series import Series

REWARDS = {"greedy_reward": "greedy", "sampled_reward": "sampled"}
LEFT, PLOT, BOTTOM = 56, 230, 48
# A line no longer than this gets a dot for each point.
LONGEST_DOTTED = 30


@dataclass(frozen=True)
class Line:
    """The reward of a run. Of several runs, colours are for the runs and dashes for the second reward."""

    name: str
    colour: int
    points: Series
    dashed: bool = False


def write_plot(runs: Sequence[Path], output_svg: Path) -> Path:
    """Write the held-out reward of the runs over the documents seen, and return the path."""
    if not runs:
        raise ValueError("a plot needs at least one run")
    return write_text_whole(Path(output_svg), _document(_lines(read_runs(runs))))


def _lines(runs: Sequence[Run]) -> list[Line]:
    lines = []
    for index, run in enumerate(runs):
        for number, (key, name) in enumerate(REWARDS.items()):
            points = run.evaluation_points(key)
            if points.extremes:
                one = len(runs) == 1
                label, colour = (name, number) if one else (f"{run.name}, {name}", index)
                lines.append(Line(label, colour, points, dashed=not one and number == 1))
    return lines


def _document(lines: Sequence[Line]) -> str:
    drawing = Drawing("Held-out reward", "mean over prompts", 0)
    dashed = [number for number, line in enumerate(lines) if line.dashed]
    rows = drawing.legend([(line.name, line.colour) for line in lines], 70, dashed=dashed)
    top = 70 + LEGEND_LINE * rows
    drawing.height = top + PLOT + BOTTOM
    # What runs share is the documents they saw; steps are the fallback.
    by_documents = any(np.isfinite(line.points.documents).any() for line in lines)
    places = [line.points.documents if by_documents else line.points.steps for line in lines]
    if not lines:
        drawing.text(WIDTH / 2, top + PLOT / 2, "No evaluation has been logged.", anchor="middle")
        return drawing.svg()
    extremes = [value for line in lines for value in line.points.extremes]
    vertical = linear_scale([*extremes, 0.0] if min(extremes) >= 0 else extremes)
    known = [place for some in places for place in some[np.isfinite(some)].tolist()]
    horizontal = linear_scale([min(known), max(known)], count=4, snap=False, whole=True)
    _draw_axes(drawing, horizontal, vertical, top, "documents seen" if by_documents else "step")
    for line, some in zip(lines, places, strict=True):
        points = [
            (_x(horizontal, place), top + PLOT * (1 - vertical.position(value)))
            if np.isfinite(place) and np.isfinite(value)
            else None
            for place, value in zip(some.tolist(), line.points.values.tolist(), strict=True)
        ]
        for there, group in groupby(points, key=lambda place: place is not None):
            if there:
                drawing.path([place for place in group if place], line.colour, dashed=line.dashed)
        if len(points) <= LONGEST_DOTTED:
            for place in filter(None, points):
                drawing.dot(*place, line.colour, size=3)
    return drawing.svg()


def _x(horizontal: Scale, place: float) -> float:
    return LEFT + (WIDTH - LEFT - MARGIN) * horizontal.position(place)


def _draw_axes(drawing: Drawing, horizontal: Scale, vertical: Scale, top: float, label: str) -> None:
    for tick, text in zip(vertical.ticks, vertical.labels, strict=True):
        y = top + PLOT * (1 - vertical.position(tick))
        drawing.line(LEFT, y, WIDTH - MARGIN, y)
        drawing.text(LEFT - 8, y + 4.5, text, anchor="end")
    for tick, text in zip(horizontal.ticks, horizontal.labels, strict=True):
        drawing.text(_x(horizontal, tick), top + PLOT + 18, text, anchor="middle")
    drawing.text(WIDTH - MARGIN, top + PLOT + 38, label, anchor="end")
