"""The report as one HTML file, which needs nothing else to be read."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from truestep.files import write_text_whole
from truestep.report.charts import GROUPS, charts_of, group_html, groups_for, legend_html, shared_scales
from truestep.report.examples import examples_html
from truestep.report.figures import Figure, facts, tiles
from truestep.report.health import health
from truestep.report.runs import Run, read_runs
from truestep.report.script import PAGE_SCRIPT
from truestep.report.style import COLOURS, PAGE_CSS, palette_css
from truestep.report.svg import Line

MARKS = {"bad": ("\N{MULTIPLICATION X}", "Wrong"), "warning": ("!", "Warning")}
MARKS |= {"good": ("\N{CHECK MARK}", "Good"), "note": ("i", "Note")}


def write_report(runs: Sequence[Path], output: Path, *, title: str | None = None) -> Path:
    """Writes the page of one run, or of several compared, and returns its path."""
    if not runs:
        raise ValueError("a report needs at least one run")
    return write_text_whole(Path(output), page_html(read_runs(runs), title=title))


def page_html(runs: Sequence[Run], *, title: str | None = None) -> str:
    title = title or (" against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs compared")
    plans = [(group, [chart for plan in plans for chart in charts_of(plan, runs)]) for group, plans in groups_for(runs)]
    scales = shared_scales([chart for _, charts in plans for chart in charts])
    # What runs share is the documents they saw; steps are the fallback.
    axis = next(iter(scales), "step")
    parts = [
        f'<!DOCTYPE html>\n<html lang="en" data-axis="{axis}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Whatever a completion holds, the page loads nothing from anywhere.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{palette_css()}{PAGE_CSS}</style>\n</head>\n<body>\n<main>\n",
        _header(runs, title),
        _tiles(runs[0]) if len(runs) == 1 else _comparison(runs),
        _health(runs),
        _bar(runs, list(scales)),
    ]
    parts += [group_html(group, charts, scales, legend=len(runs) == 1) for group, charts in plans]
    parts += [_absent(runs) if scales else "", examples_html(runs), _configs(runs)]
    parts.append(f"</main>\n<script>{PAGE_SCRIPT}</script>\n</body>\n</html>\n")
    return "".join(parts)


def _header(runs: Sequence[Run], title: str) -> str:
    parts = [f"<header>\n<h1>{escape(title)}</h1>\n"]
    if len(runs) == 1:
        parts.append(f'<p class="path">{escape(str(runs[0].path))}</p>\n')
        items = "".join(f"<div><dt>{escape(fact.label)}</dt><dd>{_value(fact)}</dd></div>" for fact in facts(runs[0]))
        parts.append(f'<dl class="facts">{items}</dl>\n')
    by_versions: dict[str, list[str]] = {}
    for run in runs:
        listed = " \N{MIDDLE DOT} ".join(f"{name} {version}" for name, version in run.versions.items())
        by_versions.setdefault(listed, []).append(run.name)
    for listed, names in by_versions.items():
        # Runs of the same versions need no telling apart.
        of = f"{', '.join(names)}: " if len(by_versions) > 1 else ""
        if listed:
            parts.append(f'<p class="versions">{escape(of + listed)}</p>\n')
    return "".join([*parts, "</header>\n"])


def _value(figure: Figure) -> str:
    # A minus sign is as wide as a plus sign; a hyphen is not.
    return escape(figure.value).replace("-", "\N{MINUS SIGN}")


def _detail(figure: Figure) -> str:
    return escape(figure.detail).replace("-", "\N{MINUS SIGN}")


def _tiles(run: Run) -> str:
    items = "".join(
        f'<div class="tile"><dt>{escape(tile.label)}</dt><dd>{_value(tile)}</dd>'
        + (f'<dd class="detail">{_detail(tile)}</dd>' if tile.detail else "")
        + "</div>\n"
        for tile in tiles(run)
    )
    return f'<dl class="tiles">\n{items}</dl>\n'


def _comparison(runs: Sequence[Run]) -> str:
    """The tiles of several runs as a table, a column a run."""
    columns = [[*tiles(run), *facts(run)] for run in runs]
    head = "<td></td>"
    for index, run in enumerate(runs):
        swatch = f'<i class="swatch colour-{index % COLOURS}{" dashed" if index >= COLOURS else ""}"></i>'
        head += f'<th scope="col">{swatch}{escape(run.name)}<small>{escape(str(run.path))}</small></th>'
    body = ""
    for row in zip(*columns, strict=True):
        # The step of the first ratio is part of its tile's label, and may differ.
        label = row[0].label if len({cell.label for cell in row}) == 1 else row[0].label.split(" at step")[0]
        cells = "".join(
            f"<td>{_value(cell)}" + (f"<small>{_detail(cell)}</small>" if cell.detail else "") + "</td>" for cell in row
        )
        body += f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>\n'
    return f'<div class="table card"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def _health(runs: Sequence[Run]) -> str:
    parts = ['<h2>Health</h2>\n<div class="healths">\n']
    for run in runs:
        items = ""
        for note in health(run):
            mark, name = MARKS[note.level]
            symbol = f'<span class="mark" role="img" aria-label="{name}">{mark}</span>'
            items += f'<li class="{note.level}">{symbol}<p>{escape(note.text)}</p></li>\n'
        name = f"<h3>{escape(run.name)}</h3>\n" if len(runs) > 1 else ""
        parts.append(f'<div class="notes card">\n{name}<ul>\n{items}</ul>\n</div>\n')
    return "".join([*parts, "</div>\n"])


def _bar(runs: Sequence[Run], axes: Sequence[str]) -> str:
    """The legend of the runs and the switch of the axis, which stay in sight."""
    if not axes:
        return (
            '<h2>Charts</h2>\n<p class="card empty">Nothing to draw: no step and no evaluation has been logged.</p>\n'
        )
    parts = []
    if len(runs) > 1:
        parts.append(legend_html([Line(run.name, i % COLOURS, (), i >= COLOURS) for i, run in enumerate(runs)]))
    if len(axes) > 1:
        buttons = "".join(
            f'<button type="button" data-set="{axis}" aria-pressed="{"true" if axis == axes[0] else "false"}">'
            f"{'Documents' if axis == 'documents' else 'Steps'}</button>"
            for axis in axes
        )
        parts.append(f'<div class="switch">Horizontal axis <div role="group">{buttons}</div></div>')
    return f'<div class="bar">{"".join(parts)}</div>\n' if parts else ""


def _absent(runs: Sequence[Run]) -> str:
    absent = [plan.title for _, plans in GROUPS for plan in plans if not charts_of(plan, runs)]
    if not absent:
        return ""
    return f'<p class="absent">Not logged, so not drawn: {escape(_joined(absent))}.</p>\n'


def _joined(names: Iterable[str]) -> str:
    return ", ".join(name[0].lower() + name[1:] if not name[:2].isupper() else name for name in names)


def _configs(runs: Sequence[Run]) -> str:
    blocks = [
        f'<details class="card"><summary>{escape(run.name if len(runs) > 1 else "config.yaml")}</summary>'
        f"<pre>{escape(run.config_text)}</pre></details>\n"
        for run in runs
        if run.config_text
    ]
    return "<h2>Configuration</h2>\n" + "".join(blocks) if blocks else ""
