"""The metrics of a page as a table, which needs no JavaScript."""

from collections.abc import Sequence
from html import escape

from truestep.report.formats import format_number
from truestep.report.runs import Run
from truestep.report.series import Series
from truestep.text import printable

MOST_ROWS = 400


def numbers_html(runs: Sequence[Run]) -> str:
    """Return a table with a row for each metric. For one run it shows the first, last, smallest and largest value; for
    several runs, the last value of each."""
    rows = [
        *((f"evaluation: {key}", [run.evaluation_points(key) for run in runs]) for key in _names(runs, True)),
        *((key, [run.points(key) for run in runs]) for key in _names(runs, False)),
    ]
    rows = [(name, series) for name, series in rows if any(one.extremes for one in series)]
    if not rows:
        return ""
    heads = ["first", "last", "smallest", "largest"] if len(runs) == 1 else [f"{run.name}, last" for run in runs]
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = ""
    for name, series in rows[:MOST_ROWS]:
        cells = _cells(series[0]) if len(runs) == 1 else [_cells(one)[1] for one in series]
        shown = "".join(f"<td>{escape(_signed(cell))}</td>" for cell in cells)
        body += f'<tr><th scope="row">{escape(printable(name, 100))}</th>{shown}</tr>\n'
    left = f'<p class="absent">and {len(rows) - MOST_ROWS:,} more</p>' if len(rows) > MOST_ROWS else ""
    return (
        '<h2 id="numbers">Numbers</h2>\n<noscript><p class="absent">The charts need JavaScript; this table does not.'
        '</p></noscript>\n<details class="card numbers"><summary>All metrics as numbers</summary><div class="scroll">'
        f"<table><thead><tr><td></td>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>{left}</details>\n"
    )


def _names(runs: Sequence[Run], evaluations: bool) -> list[str]:
    tables = [run.evaluations if evaluations else run.metrics for run in runs]
    return [name for name in dict.fromkeys(name for table in tables for name in table.names) if name != "step"]


def _cells(points: Series) -> list[str]:
    present = points.present
    if not len(present):
        return [format_number(None)] * 4
    return [format_number(float(value)) for value in (present[0], present[-1], present.min(), present.max())]


def _signed(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text
