"""The verdicts as a table for the terminal, as JSON, and as a figure."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from truestep.report.drawing import LEGEND_LINE, MARGIN, WIDTH, Drawing
from truestep.tools.verify.difference import BOUND, Difference
from truestep.tools.verify.judge import Verdict

# The kinds of difference that have a size.
_KINDS = ("loss", "metric", "gradient", "log-prob", "update")
_ROW, _LEFT, _WIDTH = 42, MARGIN + 8, WIDTH - 2 * MARGIN - 16
_LOW, _HIGH = -9.0, 0.0  # the ends of the axis, as powers of ten


def table(verdicts: Sequence[Verdict]) -> Table:
    rows = Table(box=None, header_style="bold", pad_edge=False)
    rows.add_column("layout", no_wrap=True)
    for kind in _KINDS:
        rows.add_column(kind, justify="right", no_wrap=True)
    rows.add_column("")
    for verdict in verdicts:
        cells = [_cell(verdict, kind) for kind in _KINDS]
        rows.add_row(verdict.layout.name, *cells, Text("ok", "green") if verdict.passed else Text("WRONG", "bold red"))
    return rows


def _worst(verdict: Verdict, kind: str) -> Difference | None:
    """Return the worst difference of a kind; for updates, of the moments or the weights."""
    kinds = ("moment", kind) if kind == "update" else (kind,)
    return max((verdict.worst[each] for each in kinds if each in verdict.worst), key=lambda d: d.excess, default=None)


def _cell(verdict: Verdict, kind: str) -> Text:
    worst = _worst(verdict, kind)
    text = "" if worst is None else f"{worst.value:.0e}"
    if kind == "gradient" and (half := verdict.worst.get("half precision")):
        worst, text = half, f"{half.value:.2f} x"  # the ratio of two errors, not a difference
    return Text(text, style="" if worst is None or not worst.wrong else "bold red")


def complaints(verdict: Verdict) -> list[str]:
    if verdict.failure is not None:
        return [f"did not run: {verdict.failure}"]
    return [
        f"{wrong.kind} {wrong.name} at step {wrong.step}: {wrong.value:.1e}, at most {wrong.bound:.0e}"
        for wrong in verdict.wrong
    ]


def as_json(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "passed": all(verdict.passed for verdict in verdicts),
        "layouts": [
            {
                "name": verdict.layout.name,
                "ranks": verdict.layout.ranks,
                "options": verdict.layout.options,
                "passed": verdict.passed,
                "seconds": verdict.seconds,
                "failure": verdict.failure,
                "worst": {
                    kind: {"name": worst.name, "step": worst.step, "value": worst.value, "bound": worst.bound}
                    for kind, worst in verdict.worst.items()
                },
            }
            for verdict in verdicts
        ],
    }


def figure(verdicts: Sequence[Verdict]) -> str:
    """Draw a row for each layout, with a dot for the worst difference of each kind, on a logarithmic axis."""
    drawing = Drawing("Worst differences from the reference", "relative, by layout; a logarithmic axis", 0)
    top = 70 + LEGEND_LINE * drawing.legend([(kind, number) for number, kind in enumerate(_KINDS)], 70, dots=True) + 8
    # Layouts in half precision have an additional line of text.
    space = _ROW + 16 * any("half precision" in verdict.worst for verdict in verdicts)
    bottom = top + space * len(verdicts)
    drawing.height = bottom + 32
    for power in range(int(_LOW), int(_HIGH) + 1):
        x = _place(10.0**power)
        drawing.line(x, top, x, bottom)
        if power % 2 == 0:
            drawing.text(x, bottom + 18, f"1e{power}", anchor="middle")
    x = _place(BOUND)
    drawing.line(x, top - 4, x, bottom, "bound")
    drawing.text(x, top - 8, f"bound {BOUND:.0e}", anchor="middle", kind="strong")
    for row, verdict in enumerate(verdicts):
        y = top + space * row
        name = verdict.layout.name if verdict.passed else f"{verdict.layout.name}: WRONG"
        drawing.text(MARGIN, y + 15, name, kind="strong" if verdict.passed else "wrong")
        drawing.line(_LEFT, y + 28, _LEFT + _WIDTH, y + 28)
        for number, kind in enumerate(_KINDS):
            if (worst := _worst(verdict, kind)) is not None:
                drawing.dot(_place(worst.value), y + 28, number, f"{kind} {worst.name}: {worst.value:.2e}")
        if (half := verdict.worst.get("half precision")) is not None:
            text = f"gradient's error {half.value:.2f} x that of one process, at most {half.bound}"
            drawing.text(MARGIN, y + 49, text, kind="" if verdict.passed else "wrong")
    return drawing.svg()


def _place(value: float) -> float:
    power = _HIGH if not math.isfinite(value) else math.log10(max(value, 1e-30))
    return _LEFT + _WIDTH * (min(max(power, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
