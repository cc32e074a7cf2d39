"""The verdicts as a table for the terminal, as JSON, and as a figure."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from truestep.verify.judge import BOUND, UPDATE_BOUND, Verdict, bound_of

# The kinds of difference that have a size, and their colours.
_COLOURS = {"loss": "#4053d3", "metric": "#ddb310", "gradient": "#b51d14", "log-prob": "#00beff", "update": "#00b25d"}
_ROW, _LEFT, _WIDTH = 26, 240, 720
_LOW, _HIGH = -9.0, 0.0  # the ends of the axis, as powers of ten


def table(verdicts: Sequence[Verdict]) -> Table:
    rows = Table(box=None, header_style="bold", pad_edge=False)
    rows.add_column("layout", no_wrap=True)
    for kind in _COLOURS:
        rows.add_column(kind, justify="right", no_wrap=True)
    rows.add_column("")
    for verdict in verdicts:
        cells = [_cell(verdict, kind) for kind in _COLOURS]
        rows.add_row(verdict.layout.name, *cells, Text("ok", "green") if verdict.passed else Text("WRONG", "bold red"))
    return rows


def _cell(verdict: Verdict, kind: str) -> Text:
    worst = verdict.worst.get(kind)
    text = "" if worst is None else f"{worst.value:.0e}"
    if kind == "gradient" and (half := verdict.worst.get("half precision")):
        worst, text = half, f"{half.value:.2f} x"  # the ratio of two errors, not a difference
    return Text(text, style="" if worst is None or worst.value <= bound_of(worst.kind) else "bold red")


def complaints(verdict: Verdict) -> list[str]:
    if verdict.failure is not None:
        return [f"did not run: {verdict.failure}"]
    return [
        f"{wrong.kind} {wrong.name} at step {wrong.step}: {wrong.value:.1e}, at most {bound_of(wrong.kind):.0e}"
        for wrong in verdict.wrong
    ]


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "passed": all(verdict.passed for verdict in verdicts),
        "bounds": {"relative": BOUND, "update": UPDATE_BOUND},
        "layouts": [
            {
                "name": verdict.layout.name,
                "ranks": verdict.layout.ranks,
                "options": verdict.layout.options,
                "passed": verdict.passed,
                "seconds": verdict.seconds,
                "failure": verdict.failure,
                "worst": {
                    kind: {"name": worst.name, "step": worst.step, "value": worst.value}
                    for kind, worst in verdict.worst.items()
                },
            }
            for verdict in verdicts
        ],
    }


def figure(verdicts: Sequence[Verdict]) -> str:
    """Draw a row for each layout, with a dot for the worst difference of each kind, on a logarithmic axis."""
    height = _ROW * (len(verdicts) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 40} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    bottom = _ROW * (len(verdicts) + 1)
    for power in range(int(_LOW), int(_HIGH) + 1):
        x = _place(10.0**power)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_ROW}" y2="{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#666">1e{power}</text>')
    x = _place(BOUND)
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_ROW}" y2="{bottom}" stroke="#333" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{x:.1f}" y="{_ROW - 8}" text-anchor="middle" fill="#333">bound</text>')
    for row, verdict in enumerate(verdicts):
        y = _ROW * (row + 1.5)
        ink = "#222" if verdict.passed else "#b51d14"
        name = escape(verdict.layout.name)
        parts.append(f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end" fill="{ink}">{name}</text>')
        for kind, worst in verdict.worst.items():
            if kind in _COLOURS:
                parts.append(
                    f'<circle cx="{_place(worst.value):.1f}" cy="{y:.1f}" r="4.5" fill="{_COLOURS[kind]}" '
                    f'fill-opacity="0.85"><title>{escape(f"{kind} {worst.name}: {worst.value:.2e}")}</title></circle>'
                )
            elif kind == "half precision":
                text = escape(f"gradient's error {worst.value:.2f} x that of one process, at most {bound_of(kind)}")
                parts.append(f'<text x="{_LEFT + 8}" y="{y + 4:.1f}" fill="{ink}">{text}</text>')
    for number, (kind, colour) in enumerate(_COLOURS.items()):
        x, y = _LEFT + 130 * number, bottom + 46
        parts.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 4}" fill="#222">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _place(value: float) -> float:
    power = _HIGH if not math.isfinite(value) else math.log10(max(value, 1e-30))
    return _LEFT + _WIDTH * (min(max(power, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
