"""The generations of a run whose ranks come and go, as a table and as marks on the charts."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from truestep.report.formats import format_number
from truestep.report.runs import Run
from truestep.report.tables import finite
from truestep.text import printable

_COLUMNS = ("after step", "ranks", "steps made again", "seconds lost", "left", "joined", "why the one before ended")
_MOST_ROWS = 200  # rows for each run


def generations_html(runs: Sequence[Run]) -> str:
    """Return a table with a row for each generation, empty if no run has more than one."""
    rows = [(run, line) for run in runs if len(run.generations) > 1 for line in run.generations[-_MOST_ROWS:]]
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{text}</th>' for text in _COLUMNS)
    body = ""
    for run, line in rows:
        number = format_number(finite(line, "generation"))
        name = number if len(runs) == 1 else f"{run.name}: {number}"
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(line))
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>\n'
    return (
        '<h2 id="generations">Generations</h2>\n<p>A generation is the run between two changes of its ranks. '
        "The charts have a line where each begins.</p>\n"
        '<div class="card numbers"><div class="scroll"><table>'
        f"<thead><tr><td></td>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div></div>\n"
    )


def _cells(line: dict[str, Any]) -> list[str]:
    numbers = [format_number(finite(line, name)) for name in ("step", "ranks", "lost_steps", "lost_seconds")]
    agents = [_names(line.get(name)) for name in ("left", "joined")]
    return [*numbers, *agents, printable(line.get("reason") or "", 500)]


def _names(value: Any) -> str:
    return ", ".join(printable(name, 80) for name in value[:20]) if isinstance(value, list) else ""


def begun_after(run: Run) -> np.ndarray:
    """Return the steps after which generations begin, but for the first."""
    steps = [finite(line, "step") for line in run.generations[1:]]
    return np.unique(np.array([step for step in steps if step is not None], np.float64))
