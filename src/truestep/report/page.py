"""The report as one HTML file that needs no other."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from truestep.files import write_text_whole
from truestep.report.browser import BROWSER_CSS, BROWSER_SCRIPT, rollouts_html
from truestep.report.charts import GROUPS, MINUS, charts_of, group_html, groups_for, legend_html
from truestep.report.examples import examples_html
from truestep.report.figures import facts, tiles
from truestep.report.health import health
from truestep.report.runs import Run, read_runs
from truestep.report.script import PAGE_SCRIPT
from truestep.report.series import Series
from truestep.report.style import COLOURS, PAGE_CSS, palette_css
from truestep.report.svg import Chart, Line, horizontal_scales

MARKS = {
    "bad": ("\N{MULTIPLICATION X}", "Wrong"),
    "warning": ("!", "Warning"),
    "good": ("\N{CHECK MARK}", "Good"),
    "note": ("i", "Note"),
}


def write_report(runs: Sequence[Path], output: Path, *, title: str | None = None) -> Path:
    """Write the page of one run, or of several compared, and return its path."""
    if not runs:
        raise ValueError("a report needs at least one run")
    return write_text_whole(Path(output), _page_html(read_runs(runs), title))


def _page_html(runs: Sequence[Run], title: str | None) -> str:
    title = title or (" against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs compared")
    groups = {
        group: [chart for plan in plans for chart in charts_of(plan, runs)] for group, plans in groups_for(runs).items()
    }
    scales = horizontal_scales([chart for charts in groups.values() for chart in charts])
    # What runs share is the documents they saw; steps are the fallback.
    axis = next(iter(scales), "step")
    parts = [
        f'<!DOCTYPE html>\n<html lang="en" data-axis="{axis}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Whatever a completion holds, the page loads nothing from anywhere.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{palette_css()}{PAGE_CSS}{BROWSER_CSS}</style>\n</head>\n<body>\n<main>\n",
        _header(runs, title),
        _tiles(runs[0]) if len(runs) == 1 else _comparison(runs),
        _health(runs),
        _bar(runs, list(scales)),
        *(group_html(group, charts, scales, legend=len(runs) == 1) for group, charts in groups.items()),
        _absent(groups) if scales else "",
        rollouts_html(runs),
        examples_html(runs),
        _configs(runs),
        f"</main>\n<script>{PAGE_SCRIPT}{BROWSER_SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return "".join(parts)


def _header(runs: Sequence[Run], title: str) -> str:
    html = f"<header>\n<h1>{escape(title)}</h1>\n"
    if len(runs) == 1:
        items = "".join(
            f"<div><dt>{escape(fact.label)}</dt><dd>{_signed(fact.value)}</dd></div>" for fact in facts(runs[0])
        )
        html += f'<p class="path">{escape(str(runs[0].path))}</p>\n<dl class="facts">{items}</dl>\n'
    names_by_versions: dict[str, list[str]] = {}
    for run in runs:
        versions = " \N{MIDDLE DOT} ".join(f"{name} {version}" for name, version in run.versions.items())
        names_by_versions.setdefault(versions, []).append(run.name)
    for versions, names in names_by_versions.items():
        # Runs of the same versions need no telling apart.
        prefix = f"{', '.join(names)}: " if len(names_by_versions) > 1 else ""
        if versions:
            html += f'<p class="versions">{escape(prefix + versions)}</p>\n'
    return html + "</header>\n"


def _signed(text: str) -> str:
    # A minus sign is as wide as a plus sign; a hyphen is not.
    return escape(text).replace("-", MINUS)


def _tiles(run: Run) -> str:
    items = "".join(
        f'<div class="tile"><dt>{escape(tile.label)}</dt><dd>{_signed(tile.value)}</dd>'
        + (f'<dd class="detail">{_signed(tile.detail)}</dd>' if tile.detail else "")
        + "</div>\n"
        for tile in tiles(run)
    )
    return f'<dl class="tiles">\n{items}</dl>\n'


def _comparison(runs: Sequence[Run]) -> str:
    """Write the tiles of several runs as a table with a column for each run."""
    head = "<td></td>"
    for index, run in enumerate(runs):
        swatch = f'<i class="swatch colour-{index % COLOURS}{" dashed" if index >= COLOURS else ""}"></i>'
        head += f'<th scope="col">{swatch}{escape(run.name)}<small>{escape(str(run.path))}</small></th>'
    body = ""
    for row in zip(*([*tiles(run), *facts(run)] for run in runs), strict=True):
        # The step of the first ratio is part of its tile's label, and may differ.
        label = row[0].label if len({cell.label for cell in row}) == 1 else row[0].label.split(" at step")[0]
        body += f'<tr><th scope="row">{escape(label)}</th>'
        for cell in row:
            detail = f"<small>{_signed(cell.detail)}</small>" if cell.detail else ""
            body += f"<td>{_signed(cell.value)}{detail}</td>"
        body += "</tr>\n"
    return f'<div class="table card"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def _health(runs: Sequence[Run]) -> str:
    html = '<h2>Health</h2>\n<div class="healths">\n'
    for run in runs:
        items = ""
        for note in health(run):
            mark, name = MARKS[note.level]
            symbol = f'<span class="mark" role="img" aria-label="{name}">{mark}</span>'
            items += f'<li class="{note.level}">{symbol}<p>{escape(note.text)}</p></li>\n'
        name = f"<h3>{escape(run.name)}</h3>\n" if len(runs) > 1 else ""
        html += f'<div class="notes card">\n{name}<ul>\n{items}</ul>\n</div>\n'
    return html + "</div>\n"


def _bar(runs: Sequence[Run], axes: Sequence[str]) -> str:
    """Write the legend of the runs and the switch of the axis, which stay in sight."""
    if not axes:
        empty = '<p class="card empty">Nothing to draw: no step and no evaluation has been logged.</p>'
        return f"<h2>Charts</h2>\n{empty}\n"
    bar = ""
    if len(runs) > 1:
        bar = legend_html(
            [Line(run.name, index % COLOURS, Series.of(()), index >= COLOURS) for index, run in enumerate(runs)]
        )
    if len(axes) > 1:
        buttons = "".join(
            f'<button type="button" data-set="{axis}" aria-pressed="{"true" if axis == axes[0] else "false"}">'
            f"{'Documents' if axis == 'documents' else 'Steps'}</button>"
            for axis in axes
        )
        bar += f'<div class="switch">Horizontal axis <div role="group">{buttons}</div></div>'
    return f'<div class="bar">{bar}</div>\n' if bar else ""


def _absent(groups: Mapping[str, Sequence[Chart]]) -> str:
    drawn = {id(chart.plan) for charts in groups.values() for chart in charts}
    titles = [plan.title for plans in GROUPS.values() for plan in plans if id(plan) not in drawn]
    names = ", ".join(title if title[:2].isupper() else title[0].lower() + title[1:] for title in titles)
    return f'<p class="absent">Not logged, so not drawn: {escape(names)}.</p>\n' if names else ""


def _configs(runs: Sequence[Run]) -> str:
    blocks = [
        f'<details class="card"><summary>{escape(run.name if len(runs) > 1 else "config.yaml")}</summary>'
        f"<pre>{escape(run.config_text)}</pre></details>\n"
        for run in runs
        if run.config_text
    ]
    return "<h2>Configuration</h2>\n" + "".join(blocks) if blocks else ""
