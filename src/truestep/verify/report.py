"""What verify found: a table for the terminal, JSON, and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from truestep.verify.judge import BOUND, KINDS, UPDATE_BOUND, Verdict, bound_of

_COLOURS = {
    "loss": "#4053d3",
    "metric": "#ddb310",
    "gradient": "#b51d14",
    "log-prob": "#00beff",
    "update": "#00b25d",
}
_ROW, _LEFT, _WIDTH = 26, 240, 720
_LOW, _HIGH = -9.0, 0.0  # powers of ten


def table(verdicts: Sequence[Verdict]) -> Table:
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("layout", no_wrap=True)
    for kind in KINDS[:-1]:
        made.add_column(kind, justify="right", no_wrap=True)
    made.add_column("")
    for verdict in verdicts:
        cells = [_cell(verdict, kind) for kind in KINDS[:-1]]
        made.add_row(verdict.layout.name, *cells, Text("ok", "green") if verdict.passed else Text("WRONG", "bold red"))
    return made


def _cell(verdict: Verdict, kind: str) -> Text:
    found = verdict.worst.get(kind)
    half = verdict.worst.get("half precision")
    if kind == "gradient" and half is not None:  # an error beside another error, not a difference
        return Text(f"{half.value:.2f} x", style="" if half.value <= bound_of(half.kind) else "bold red")
    if found is None:
        return Text("")
    return Text(f"{found.value:.0e}", style="" if found.value <= bound_of(found.kind) else "bold red")


def complaints(verdict: Verdict) -> list[str]:
    if verdict.failure is not None:
        return [f"did not run: {verdict.failure}"]
    return [
        f"{found.kind} {found.name} at step {found.step}: {found.value:.1e}, at most {bound_of(found.kind):.0e}"
        for found in verdict.wrong
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
                    kind: {"name": found.name, "step": found.step, "value": found.value}
                    for kind, found in verdict.worst.items()
                },
            }
            for verdict in verdicts
        ],
    }


def figure(verdicts: Sequence[Verdict]) -> str:
    """A row a layout, a dot for the worst difference of each kind, on a logarithmic axis with the bound in it."""
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
        half = verdict.worst.get("half precision")
        if half is not None:
            said = escape(f"gradient's error {half.value:.2f} x that of one process, at most {bound_of(half.kind)}")
            parts.append(f'<text x="{_LEFT + 8}" y="{y + 4:.1f}" fill="{ink}">{said}</text>')
        for kind, found in verdict.worst.items():
            if kind in _COLOURS:
                parts.append(
                    f'<circle cx="{_place(found.value):.1f}" cy="{y:.1f}" r="4.5" fill="{_COLOURS[kind]}" '
                    f'fill-opacity="0.85"><title>{escape(f"{kind} {found.name}: {found.value:.2e}")}</title></circle>'
                )
    for number, kind in enumerate(KINDS[:-1]):
        x, y = _LEFT + 130 * number, bottom + 46
        parts.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 4}" fill="#222">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _place(value: float) -> float:
    power = _HIGH if not math.isfinite(value) else math.log10(max(value, 1e-30))
    return _LEFT + _WIDTH * (min(max(power, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
