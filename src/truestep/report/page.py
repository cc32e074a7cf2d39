"""The report as one self-contained HTML file."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from truestep.files.whole import write_text_whole
from truestep.report.chart_specs import GROUPS, groups_for
from truestep.report.charts import Chart, charts_of
from truestep.report.examples import examples_html
from truestep.report.figures import facts, keeps_best, tiles
from truestep.report.formats import format_number
from truestep.report.generations import generations_html
from truestep.report.health import Health, health
from truestep.report.numbers import numbers_html
from truestep.report.parts import packed, policy, script, style
from truestep.report.payload import Payload
from truestep.report.rollouts import rollouts_html
from truestep.report.runs import Run, read_runs
from truestep.report.sources import sources_html
from truestep.report.style import COLOURS
from truestep.report.verdicts import Verdict
from truestep.text import printable

_MOST_PLACES = 3  # files and datasets that the page's subject names
MINUS = "\N{MINUS SIGN}"
MARKS = {
    "bad": ("\N{MULTIPLICATION X}", "Wrong"),
    "warning": ("!", "Warning"),
    "good": ("\N{CHECK MARK}", "Good"),
    "note": ("i", "Note"),
}


def write_report(runs: Sequence[str | Path], output: str | Path, *, title: str | None = None) -> Path:
    """Write the page of one run, or of a comparison of several runs, and return its path."""
    return write_text_whole(Path(output), page_html([Path(run) for run in runs], title))


def page_html(paths: Sequence[Path], title: str | None = None) -> str:
    """Return the page as HTML."""
    if not paths:
        raise ValueError("a report needs at least one run")
    runs = read_runs(paths)
    title = title or (" against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs compared")
    groups = {
        group: [chart for spec in specs for chart in charts_of(spec, runs)] for group, specs in groups_for(runs).items()
    }
    drawn = [chart for charts in groups.values() for chart in charts if chart.constant is None]
    payload = Payload(runs, drawn)
    parts = {
        "Generations": generations_html(runs),
        "Sources": sources_html(runs),
        "Rollouts": rollouts_html(runs),
        "Evaluations": examples_html(runs),
        "Numbers": numbers_html(runs),
        "Configuration": _configs(runs),
    }
    subject = _subject(runs[0]) if len(runs) == 1 else ""
    head = f"{title}: {subject}" if subject else title
    sections = [
        _header(runs, title, subject),
        _tiles(runs[0]) if len(runs) == 1 else _comparison(runs),
        _shows(runs),
        _bar(runs, groups, parts),
        *(_group_html(group, charts, drawn) for group, charts in groups.items()),
        _absent(groups) if any(groups.values()) else "",
        *parts.values(),
    ]
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            # A completion may contain anything. The policy forbids the page to load anything, and allows only its own
            # script.
            f'<meta http-equiv="Content-Security-Policy" content="{policy()}">\n'
            f"<title>{escape(head)}</title>\n<style>\n{style()}</style>\n</head>\n<body>\n<main>\n",
            *sections,
            f'<script type="text/plain" data-part="charts">{packed(payload.value())}</script>\n</main>\n',
            f"<script>{script()}</script>\n</body>\n</html>\n",
        ]
    )


def _group_html(title: str, charts: Sequence[Chart], drawn: Sequence[Chart]) -> str:
    """Return the containers of a group's charts. Charts whose values are constant become a line of text."""
    if not charts:
        return ""
    figures = "".join(_figure_html(chart, number) for number, chart in enumerate(drawn) if chart in charts)
    constant = "; ".join(text for chart in charts if (text := chart.constant) is not None)
    return (
        f'<h2 id="{_anchor(title)}">{escape(title)}</h2>\n'
        + (f'<div class="charts">\n{figures}</div>\n' if figures else "")
        + (f'<p class="absent constant">Constant: {escape(constant)}.</p>\n' if constant else "")
    )


def _figure_html(chart: Chart, number: int) -> str:
    unit = f'<span class="unit">{escape(chart.spec.unit)}</span>' if chart.spec.unit else ""
    note = f'<p class="gaps">{escape(" ".join(chart.notes))}</p>' if chart.notes else ""
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}" data-chart="{number}"><figcaption>'
        f'<h3>{escape(chart.title)}</h3>{unit}</figcaption><div class="plot"></div>{note}</figure>\n'
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-").replace(",", "")


def _header(runs: Sequence[Run], title: str, subject: str) -> str:
    html = f"<header>\n<h1>{escape(title)}</h1>\n"
    if len(runs) == 1:
        items = "".join(
            f"<div><dt>{escape(fact.label)}</dt><dd>{_signed(fact.value)}</dd></div>" for fact in facts(runs[0])
        )
        html += f'<p class="subject">{escape(subject)}</p>\n' if subject else ""
        html += f'<p class="path">{escape(str(runs[0].path))}</p>\n<dl class="facts">{items}</dl>\n'
    names_by_versions: dict[str, list[str]] = {}
    for run in runs:
        versions = " \N{MIDDLE DOT} ".join(f"{name} {version}" for name, version in run.versions.items())
        names_by_versions.setdefault(versions, []).append(run.name)
    for versions, names in names_by_versions.items():
        # Name the runs only if their versions differ.
        prefix = f"{', '.join(names)}: " if len(names_by_versions) > 1 else ""
        if versions:
            html += f'<p class="versions">{escape(prefix + versions)}</p>\n'
    return html + "</header>\n"


def _subject(run: Run) -> str:
    """Say what is trained, by what and on what: "smollm2 by grpo on prompts.jsonl, reward reward:score"."""
    model, loss = run.option("model", "path"), run.option("loss", "type")
    places = _places(run.option("sampler", "prompts") or run.option("data", "path"))
    shown = (
        places
        if len(places) <= _MOST_PLACES
        else [*places[: _MOST_PLACES - 1], f"{len(places) - _MOST_PLACES + 1} more"]
    )
    words = [
        (Path(model).name or model) if isinstance(model, str) else "",
        f"by {loss}" if isinstance(loss, str) else "",
        f"on {', '.join(shown)}" if shown else "",
    ]
    said = " ".join(filter(None, words))
    reward, environment = run.option("sampler", "reward"), run.option("sampler", "environment")
    if said and isinstance(reward, str):
        said += f", reward {reward}"
    if said and isinstance(environment, dict):
        named = environment.get("class") or environment.get("run") or environment.get("type")
        said += f", environment {' '.join(map(str, named)) if isinstance(named, list) else named}"
    return printable(said)


def _places(given: object) -> list[str]:
    """List the files and datasets of sampler.prompts or data.path: one, a list, a dataset, or several by name."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, dict):
        one = given.get("dataset")
        return [one] if isinstance(one, str) else _places(list(given.values()))
    return [place for part in given for place in _places(part)] if isinstance(given, list) else []


def _signed(text: str) -> str:
    # A minus sign is as wide as a plus sign; a hyphen is narrower, so replace it.
    return escape(text).replace("-", MINUS)


def _tiles(run: Run) -> str:
    items = "".join(
        f'<div class="tile"><dt>{escape(tile.label)}</dt><dd>{_signed(tile.value)}</dd>'
        + (f'<dd class="detail">{_signed(tile.detail)}</dd>' if tile.detail else "")
        + "</div>\n"
        for tile in tiles(run, keeps_best(run))
    )
    return f'<dl class="tiles">\n{items}</dl>\n'


def _comparison(runs: Sequence[Run]) -> str:
    """Return the tiles of several runs as a table with one column for each run."""
    head = "<td></td>"
    for index, run in enumerate(runs):
        head += f'<th scope="col">{_swatch(index)}{escape(run.name)}<small>{escape(str(run.path))}</small></th>'
    body = ""
    for row in zip(*([*tiles(run, any(map(keeps_best, runs))), *facts(run)] for run in runs), strict=True):
        # The label of the first ratio's tile contains its step, which may differ between runs.
        label = row[0].label if len({cell.label for cell in row}) == 1 else row[0].label.split(" at step")[0]
        body += f'<tr><th scope="row">{escape(label)}</th>'
        for cell in row:
            detail = f"<small>{_signed(cell.detail)}</small>" if cell.detail else ""
            body += f"<td>{_signed(cell.value)}{detail}</td>"
        body += "</tr>\n"
    return f'<div class="table card"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def _shows(runs: Sequence[Run]) -> str:
    """Return the section of verdicts: each run's verdicts, its earlier warnings, and the notes on its files."""
    html = '<h2 id="what-this-run-shows">What this run shows</h2>\n<div class="healths">\n'
    for run in runs:
        found = health(run)
        name = f"<h3>{escape(run.name)}</h3>\n" if len(runs) > 1 else ""
        items = "".join(_verdict_html(verdict, run) for verdict in found.verdicts)
        said = "".join(f"<li>{escape(text)}</li>\n" for text in _said_and_gone(found, run))
        facts = "".join(_item(note.level, f"<p>{escape(note.text)}</p>") for note in found.notes)
        earlier = f'<details class="said"><summary>Said earlier</summary><ul>\n{said}</ul></details>\n' if said else ""
        html += (
            f'<div class="notes card{" well" if found.well else ""}">\n{name}<ul class="verdicts">\n{items}</ul>\n'
            f'{earlier}<ul class="facts-of-files">\n{facts}</ul>\n</div>\n'
        )
    return html + "</div>\n"


def _verdict_html(verdict: Verdict, run: Run) -> str:
    sentence = f"{verdict.evidence[:1].upper()}{verdict.evidence[1:]}"
    since = next((warning.get("step") for warning in run.warnings if warning.get("kind") == verdict.kind), None)
    if isinstance(since, int):
        sentence += f" The run said so after step {format_number(since)}."
    advice = f'<p class="do">{escape(verdict.advice)}</p>' if verdict.advice else ""
    return _item(
        verdict.level, f'<div><p class="title">{escape(verdict.title)}</p><p>{escape(sentence)}</p>{advice}</div>'
    )


def _item(level: str, html: str) -> str:
    mark, name = MARKS[level]
    return f'<li class="{level}"><span class="mark" role="img" aria-label="{name}">{mark}</span>{html}</li>\n'


def _said_and_gone(found: Health, run: Run) -> list[str]:
    """List the run's warnings whose verdict no longer holds."""
    standing = [verdict.kind for verdict in found.verdicts]
    gone = [warning for warning in run.warnings if warning.get("kind") not in standing]
    return [
        f"After step {printable(warning.get('step'), 20)}: {printable(warning.get('text'), 1000)}" for warning in gone
    ]


def _bar(runs: Sequence[Run], groups: Mapping[str, Sequence[Chart]], parts: Mapping[str, str]) -> str:
    """Return the sticky bar: links to the page's parts, the legend of the runs, a container for switches."""
    if not any(groups.values()):
        empty = '<p class="card empty">Nothing to draw: no step and no evaluation has been logged.</p>'
        return f"<h2>Charts</h2>\n{empty}\n"
    names = [title for title, charts in groups.items() if charts]
    names += [name for name, html in parts.items() if html]
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name in names)
    bar = f'<nav aria-label="Parts of the page">{links}</nav>'
    if len(runs) > 1:
        items = "".join(f"<li>{_swatch(index)}{escape(run.name)}</li>" for index, run in enumerate(runs))
        bar += f'<ul class="legend">{items}</ul>'
    return f'<div class="bar">{bar}<div class="switches"></div></div>\n'


def _swatch(index: int) -> str:
    return f'<i class="swatch colour-{index % COLOURS}{" dashed" if index >= COLOURS else ""}"></i>'


def _absent(groups: Mapping[str, Sequence[Chart]]) -> str:
    drawn = {id(chart.spec) for charts in groups.values() for chart in charts}
    titles = [spec.title for specs in GROUPS.values() for spec in specs if id(spec) not in drawn]
    names = ", ".join(title if title[:2].isupper() else title[0].lower() + title[1:] for title in titles)
    return f'<p class="absent">Not logged, so not drawn: {escape(names)}.</p>\n' if names else ""


def _configs(runs: Sequence[Run]) -> str:
    blocks = [
        f'<details class="card"><summary>{escape(run.name if len(runs) > 1 else "config.yaml")}</summary>'
        f"<pre>{escape(run.config_text)}</pre></details>\n"
        for run in runs
        if run.config_text
    ]
    return '<h2 id="configuration">Configuration</h2>\n' + "".join(blocks) if blocks else ""
