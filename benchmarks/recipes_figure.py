"""Draws the curves of recipes.py: a column for each recipe, accuracy by step above and by second below, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 210, 150  # of a panel
LEFT, TOP, GAP, BELOW = 46, 40, 48, 44
COLOUR = "#1f6feb"


def figure(runs: Sequence[dict[str, Any]]) -> str:
    """Draw the mean over seeds as a line, one standard deviation around it as a band, and each seed as a thin line."""
    names = list(dict.fromkeys(run["recipe"] for run in runs if len(run["steps"]) > 1))
    width = LEFT + len(names) * (WIDTH + GAP)
    height = TOP + 2 * (HEIGHT + BELOW)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img" '
        'aria-label="Held-out accuracy of each recipe, by step and by second">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, name in enumerate(names):
        of = [run for run in runs if run["recipe"] == name and len(run["steps"]) > 1]
        x = LEFT + number * (WIDTH + GAP)
        parts.append(f'<text x="{x}" y="22" font-size="14">{escape(name)}, {len(of)} seeds</text>')
        parts += panel(of, "steps", "step", x, TOP)
        parts += panel(of, "seconds", "seconds of steps", x, TOP + HEIGHT + BELOW)
    return "\n".join([*parts, "</svg>\n"])


def panel(runs: Sequence[dict[str, Any]], axis: str, title: str, x: float, y: float) -> list[str]:
    count = min(len(run[axis]) for run in runs)
    places = [statistics.mean(run[axis][place] for run in runs) for place in range(count)]
    last = max(run[axis][count - 1] for run in runs) or 1.0

    def at(place: float, value: float) -> str:
        return f"{x + WIDTH * place / last:.1f},{y + HEIGHT * (1 - value):.1f}"

    parts = []
    for value in (0, 0.25, 0.5, 0.75, 1):
        level = y + HEIGHT * (1 - value)
        parts.append(f'<path d="M{x} {level}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 5}" y="{level + 4}" text-anchor="end" fill="#555">{value:.0%}</text>')
    for place in (0.0, last / 2, last):
        shown = f"{place:.0f}" if last >= 10 else f"{place:.1f}"
        along = x + WIDTH * place / last
        parts.append(f'<text x="{along}" y="{y + HEIGHT + 15}" text-anchor="middle" fill="#555">{shown}</text>')
    parts.append(f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT + 29}" text-anchor="middle" fill="#555">{title}</text>')
    columns = [[run["accuracy"][place] for run in runs] for place in range(count)]
    means = [statistics.mean(column) for column in columns]
    if len(runs) > 1:
        deviations = [statistics.stdev(column) for column in columns]
        above = [at(p, min(1.0, m + d)) for p, m, d in zip(places, means, deviations, strict=True)]
        below = [at(p, max(0.0, m - d)) for p, m, d in zip(places, means, deviations, strict=True)]
        parts.append(f'<polygon points="{" ".join([*above, *reversed(below)])}" fill="{COLOUR}" opacity="0.2"/>')
    for run in runs:
        points = " ".join(at(run[axis][place], run["accuracy"][place]) for place in range(count))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOUR}" stroke-width="0.6" opacity="0.6"/>')
    points = " ".join(at(place, mean) for place, mean in zip(places, means, strict=True))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOUR}" stroke-width="2"/>')
    return parts
