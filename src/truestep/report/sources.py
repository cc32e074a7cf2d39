"""The sources of prompts as a table: the groups drawn from each source, and the share of its prompts that rest."""

from collections.abc import Sequence
from html import escape

from truestep.report.formats import format_number
from truestep.report.runs import Run
from truestep.text import printable

_COLUMNS = ("groups", "share of groups", "pass", "reward, last", "too easy", "hopeless")
_MOST_ROWS = 100  # the largest number of rows for each run


def sources_html(runs: Sequence[Run]) -> str:
    """Return a table with a row for each source of each run. It is empty if no run has several sources or resting
    prompts."""
    rows = [(run, source, cells) for run in runs for source, cells in _rows(run)]
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{text}</th>' for text in _COLUMNS)
    body = ""
    for run, source, cells in rows:
        name = escape(printable(source, 60) if len(runs) == 1 else f"{run.name}: {printable(source, 60)}")
        shown = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr><th scope="row">{name}</th>{shown}</tr>\n'
    return (
        '<h2 id="sources">Sources</h2>\n<div class="card numbers"><div class="scroll"><table>'
        f"<thead><tr><td></td>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div></div>\n"
    )


def _rows(run: Run) -> list[tuple[str, list[str]]]:
    groups = {
        name.removeprefix("source_groups/"): sum(run.values(name))
        for name in run.metrics.names
        if name.startswith("source_groups/")
    }
    total = sum(groups.values())
    rows = [
        (
            source,
            [
                format_number(count),
                _percent(count / total if total else None),
                format_number(run.last(f"source_passes/{source}")),
                format_number(run.last(f"source_reward/{source}")),
                _percent(run.last(f"easy_prompts/{source}")),
                _percent(run.last(f"hopeless_prompts/{source}")),
            ],
        )
        for source, count in list(groups.items())[:_MOST_ROWS]
    ]
    resting = [run.last("easy_prompts"), run.last("hopeless_prompts")]
    if rows or resting != [None, None]:
        none = format_number(None)
        counted = [format_number(total), _percent(1.0)] if rows else [none, none]
        rows.append(("all prompts", [*counted, none, format_number(run.last("reward")), *map(_percent, resting)]))
    return rows


def _percent(share: float | None) -> str:
    return format_number(None) if share is None else f"{100 * share:.1f}%"
