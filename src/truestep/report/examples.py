"""Completions of the first and of the last evaluation, side by side."""

import json
from collections.abc import Sequence
from html import escape

from truestep.report.formats import format_number
from truestep.report.runs import Record, Run, number

MOST_EXAMPLES = 8
LONGEST_TEXT = 4000


def examples_html(runs: Sequence[Run]) -> str:
    """Return the section with the examples of all runs; an empty string if there are none."""
    html = ""
    for run in runs:
        if examples := _examples(run):
            shown = f'<div class="examples">{"".join(examples)}</div>'
            # With several runs, each run has a block that can be folded. The first block is open.
            if len(runs) == 1:
                html = f'<div class="card">{shown}</div>\n'
            else:
                opened = "" if html else " open"
                html += f'<details class="card"{opened}><summary>{escape(run.name)}</summary>{shown}</details>\n'
    return '<h2 id="evaluations">Completions, first and last evaluation</h2>\n' + html if html else ""


def _examples(run: Run) -> list[str]:
    if not run.examples:
        return []
    first, last = run.examples
    # Examples of the same prompt form a pair.
    later = [] if first is last else _listed(last)
    rows: list[tuple[str, list[tuple[Record, Record]]]] = []
    for example in _listed(first):
        prompt = _text(example, "prompt")
        rows.append((prompt, [(first, example)]))
        match = next((other for other in later if _text(other, "prompt") == prompt), None)
        if match is not None:
            later.remove(match)
            rows[-1][1].append((last, match))
    rows += [(_text(example, "prompt"), [(last, example)]) for example in later]
    # Pairs come first.
    rows.sort(key=lambda row: -len(row[1]))
    return [_row(prompt, cells) for prompt, cells in rows[:MOST_EXAMPLES]]


def _listed(record: Record) -> list[Record]:
    examples = record.get("examples")
    return [example for example in examples if isinstance(example, dict)] if isinstance(examples, list) else []


def _text(example: Record, key: str) -> str:
    value = example.get(key)
    # A prompt may be a list of messages.
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False, indent=1)


def _row(prompt: str, cells: Sequence[tuple[Record, Record]]) -> str:
    columns = ""
    for record, example in cells:
        reward = format_number(number(example, "reward"), 3).replace("-", "\N{MINUS SIGN}")
        head = f"<span>step {format_number(number(record, 'step'))}</span><span>reward <b>{reward}</b></span>"
        columns += (
            f'<div><div class="head">{head}</div><div class="text">{_shown(_text(example, "completion"))}</div></div>'
        )
    return (
        f'<div class="example"><div class="head">Prompt</div><div class="text">{_shown(prompt)}</div>'
        f'<div class="pair">{columns}</div></div>\n'
    )


def _shown(text: str) -> str:
    if not text.strip():
        return '<span class="muted">(empty)</span>'
    cut = len(text) - LONGEST_TEXT
    more = f'\n<span class="muted">(and {cut:,} more characters)</span>' if cut > 0 else ""
    return escape(text[:LONGEST_TEXT]) + more
