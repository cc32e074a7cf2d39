"""The held-out reward as a stand-alone SVG file."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from truestep.files import write_text_whole
from truestep.report.charts import MINUS
from truestep.report.runs import Run, read_runs
from truestep.report.style import COLOURS, FONT, palette_css
from truestep.report.svg import AXIS_LABELS, Chart, Line, Plan, horizontal_scales, plot_svg, vertical_scale

WIDTH, HEIGHT = 800, 420
LEFT, RIGHT, BOTTOM = 64, 28, 56
LEGEND_LINE = 20
# The width of an average character of 13 pixels; there is nothing to measure text with here.
CHARACTER = 7.0

_PLAN = Plan("Held-out reward", {"greedy_reward": "greedy", "sampled_reward": "sampled"}, from_zero=True)

CSS = """
.card{fill:var(--card)}
text{font:13px FONT;fill:var(--muted);font-variant-numeric:tabular-nums}
.title{font-size:17px;font-weight:600;fill:var(--text)}
.area path,.key{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);stroke-width:1}
.line,.key{stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.faint{stroke-width:1;opacity:.3}
.line.dashed,.key.dashed{stroke-dasharray:6 5;stroke-linecap:butt}
.dots{stroke:var(--c);stroke-width:6;stroke-linecap:round}
""".replace("FONT", FONT)


def write_plot(runs: Sequence[Path], output_svg: Path) -> Path:
    """Write the held-out reward of the runs over the documents seen, and return the path."""
    if not runs:
        raise ValueError("a plot needs at least one run")
    return write_text_whole(Path(output_svg), _plot_document(read_runs(runs)))


def _plot_document(runs: Sequence[Run]) -> str:
    chart = Chart(_PLAN, _PLAN.title, _lines(runs))
    legend, rows = _legend(chart.lines)
    top = 60 + LEGEND_LINE * rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="Held-out reward">\n<style>{palette_css("svg")}{CSS}</style>\n'
        f'<rect class="card" width="{WIDTH}" height="{HEIGHT}"/>\n'
        f'<text class="title" x="20" y="32">{chart.title}</text>\n'
    ]
    scales = horizontal_scales([chart])
    if not scales or not chart.extremes:
        parts.append(
            f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">No evaluation has been logged.</text>'
        )
        return "".join([*parts, "\n</svg>\n"])
    axis, horizontal = next(iter(scales.items()))
    width, height = WIDTH - LEFT - RIGHT, max(80, HEIGHT - top - BOTTOM)
    vertical = vertical_scale(chart)
    area = plot_svg(chart, axis, horizontal, vertical, "Held-out reward")
    place = f'<svg x="{LEFT}" y="{top}" width="{width}" height="{height}" overflow="visible" '
    parts += [legend, area.replace("<svg ", place, 1), "\n"]
    for tick, text in zip(vertical.ticks, vertical.labels, strict=True):
        y = top + height * (1 - vertical.position(tick)) + 4.5
        parts.append(f'<text x="{LEFT - 12}" y="{y:.1f}" text-anchor="end">{escape(text.replace("-", MINUS))}</text>\n')
    for tick, text in zip(horizontal.ticks, horizontal.labels, strict=True):
        x = LEFT + width * horizontal.position(tick)
        parts.append(f'<text x="{x:.1f}" y="{top + height + 20}" text-anchor="middle">{escape(text)}</text>\n')
    label = f'<text x="{WIDTH - RIGHT}" y="{top + height + 42}" text-anchor="end">{AXIS_LABELS[axis]}</text>'
    return "".join([*parts, label, "\n</svg>\n"])


def _lines(runs: Sequence[Run]) -> list[Line]:
    """Make the lines of both rewards, told apart by colour for one run and by dashes where colours are for runs."""
    lines = []
    for index, run in enumerate(runs):
        for offset, (key, name) in enumerate(_PLAN.metrics.items()):
            colour = offset if len(runs) == 1 else index % COLOURS
            label = name if len(runs) == 1 else f"{run.name}, {name}"
            if len(points := run.evaluation_points(key)):
                lines.append(Line(label, colour, points, dashed=len(runs) > 1 and offset == 1))
    return lines


def _legend(lines: Sequence[Line]) -> tuple[str, int]:
    """Write the names of the lines under the title; also give the number of rows that they need."""
    parts, x, row = [], 20.0, 0
    longest = int((WIDTH - 80) / CHARACTER)
    for line in lines:
        name = line.name if len(line.name) <= longest else line.name[: longest - 3] + "..."
        needed = 28 + CHARACTER * len(name) + 18
        if x > 20 and x + needed > WIDTH - 20:
            x, row = 20.0, row + 1
        y = 56 + LEGEND_LINE * row
        style = f"key colour-{line.colour}" + (" dashed" if line.dashed else "")
        parts.append(
            f'<path class="{style}" d="M{x:.0f} {y - 4}h20"/><text x="{x + 28:.0f}" y="{y}">{escape(name)}</text>\n'
        )
        x += needed
    return "".join(parts), row + 1 if lines else 0
