"""The report of a run whose ranks came and went: a table of its generations, and a mark on each chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from report.test_in_a_browser import CHROMIUM, shown
from report.test_report import make_run, page_of, write_lines
from truestep.report import write_report
from truestep.report.payload import Payload
from truestep.report.runs import read_runs

HOSTILE = "<img src=x onerror=alert(1)>"
LINES: list[dict[str, Any]] = [
    {"generation": 1, "step": 0, "ranks": 3, "left": [], "joined": [], "reason": None},
    {"generation": 2, "step": 6, "ranks": 2, "left": ["node7/31"], "joined": [], "reason": f"rank 2 is gone {HOSTILE}"}
    | {"lost_steps": 1, "lost_seconds": 8.25},
    {"generation": 3, "step": 14, "ranks": 3, "left": [], "joined": ["node8/2"], "reason": "an agent joined"},
]


def run_of(folder: Path, lines: list[dict[str, Any]] = LINES) -> Path:
    run = make_run(folder)
    write_lines(run / "generations.jsonl", lines)
    return run


def test_generations_are_a_table(tmp_path: Path) -> None:
    page = write_report([run_of(tmp_path / "run")], tmp_path / "page.html").read_text()
    table = page.split('<h2 id="generations">')[1].split("</table>")[0]
    assert table.count("<tr>") == 4 and HOSTILE not in table and "node7/31" in table and "node8/2" in table
    second = table.split("<tr>")[3]
    for cell in ("<td>6</td>", "<td>2</td>", "<td>1</td>", "<td>8.250</td>", "rank 2 is gone &lt;img"):
        assert cell in second, cell
    assert '<a href="#generations">' in page


@pytest.mark.parametrize("lines", [[], LINES[:1]])
def test_a_run_of_one_generation_has_no_table(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    page = write_report([run_of(tmp_path / "run", lines)], tmp_path / "page.html").read_text()
    assert 'id="generations"' not in page and page_of(tmp_path / "run") is not None


def test_charts_are_marked_where_a_generation_begins(tmp_path: Path) -> None:
    run, other = run_of(tmp_path / "run"), run_of(tmp_path / "other")
    marks = Payload(read_runs([run]), []).value()["marks"]
    assert marks == {}, "no axis without a chart"
    from truestep.report.chart_specs import groups_for
    from truestep.report.charts import charts_of

    runs = read_runs([run])
    charts = [chart for specs in groups_for(runs).values() for spec in specs for chart in charts_of(spec, runs)]
    marks = Payload(runs, charts).value()["marks"]
    assert marks["step"] == [6, 14] and marks["documents"] == [48, 112] and len(marks["clock"]) == 2
    both = read_runs([run, other])
    assert Payload(both, []).value()["marks"] == {}, "runs that are compared have marks of their own"


def test_a_generation_that_began_again_is_marked_at_the_beginning(tmp_path: Path) -> None:
    from truestep.report.generations import begun_after

    (run,) = read_runs([run_of(tmp_path / "run", [LINES[0], LINES[1] | {"step": 0}, {"generation": 3, "step": "x"}])])
    assert begun_after(run).tolist() == [0.0]


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_marks_are_drawn(tmp_path: Path) -> None:
    """All charts are there that a run of one generation has: no mark ended the drawing."""
    pages = [write_report([run_of(tmp_path / str(n), LINES[:n])], tmp_path / f"{n}.html") for n in (1, 3)]
    alone, marked = (shown(page, tmp_path / f"profile-{page.stem}") for page in pages)
    assert 'data-charts="drawn"' in marked
    assert marked.count("<canvas") == alone.count("<canvas") >= 4
