"""The results as a table for the terminal, as JSON, and as a figure."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from truestep.report.drawing import LEGEND_LINE, MARGIN, WIDTH, Drawing
from truestep.tools.verify.difference import BOUND, Difference
from truestep.tools.verify.judge import LayoutResult

# The kinds of difference that are shown in columns.
_KINDS = ("loss", "metric", "gradient", "log-prob", "update")
_WITH_METRICS = ("count", "routing", "documents")  # kinds that are shown as metrics
_ROW, _LEFT, _WIDTH = 42, MARGIN + 8, WIDTH - 2 * MARGIN - 16
_LOW, _HIGH = -9.0, 0.0  # the ends of the axis, as powers of ten


def table(results: Sequence[LayoutResult]) -> Table:
    rows = Table(box=None, header_style="bold", pad_edge=False)
    rows.add_column("layout", no_wrap=True)
    for kind in _KINDS:
        rows.add_column(kind, justify="right", no_wrap=True)
    rows.add_column("")
    for result in results:
        cells = [_cell(result, kind) for kind in _KINDS]
        rows.add_row(result.layout.name, *cells, Text("ok", "green") if result.passed else Text("WRONG", "bold red"))
    return rows


def _column(kind: str) -> str:
    """Return the kind under which a kind is shown. Kinds that a step's line does not have are shown as updates."""
    if kind in _KINDS or kind == "half precision":  # `half precision` is a ratio of errors, not a difference
        return kind
    return "metric" if kind in _WITH_METRICS else "update"


def _worst(result: LayoutResult, kind: str) -> Difference | None:
    """Return the worst difference of those that are shown with a kind."""
    shown = (difference for own, difference in result.worst.items() if _column(own) == kind)
    return max(shown, key=lambda difference: difference.excess, default=None)


def _cell(result: LayoutResult, kind: str) -> Text:
    worst = _worst(result, kind)
    text = "" if worst is None else f"{worst.value:.0e}"
    if kind == "gradient" and (half := result.worst.get("half precision")):
        worst, text = half, f"{half.value:.2f} x"  # a ratio of two errors, not a difference
    return Text(text, style="" if worst is None or not worst.wrong else "bold red")


def complaints(result: LayoutResult) -> list[str]:
    if result.failure is not None:
        return [f"did not run: {result.failure}"]
    return [
        f"{wrong.kind} {wrong.name} at step {wrong.step}: {wrong.value:.1e}, at most {wrong.bound:g}"
        for wrong in result.wrong
    ]


def as_json(results: Sequence[LayoutResult]) -> dict[str, Any]:
    return {
        "passed": all(result.passed for result in results),
        "layouts": [
            {
                "name": result.layout.name,
                "ranks": result.layout.ranks,
                "options": result.layout.options,
                "passed": result.passed,
                "seconds": result.seconds,
                "failure": result.failure,
                "worst": {
                    kind: {"name": worst.name, "step": worst.step, "value": worst.value, "bound": worst.bound}
                    for kind, worst in result.worst.items()
                },
            }
            for result in results
        ],
    }


def figure(results: Sequence[LayoutResult]) -> str:
    """Draw a row for each layout, with a dot for the worst difference of each kind, on a logarithmic axis."""
    drawing = Drawing("Worst differences from the reference", "relative, by layout; a logarithmic axis")
    top = 70 + LEGEND_LINE * drawing.legend([(kind, number) for number, kind in enumerate(_KINDS)], 70) + 8
    # Layouts in half precision have an additional line of text.
    space = _ROW + 16 * any("half precision" in result.worst for result in results)
    bottom = top + space * len(results)
    drawing.height = bottom + 32
    for power in range(int(_LOW), int(_HIGH) + 1):
        x = _place(10.0**power)
        drawing.line(x, top, x, bottom)
        if power % 2 == 0:
            drawing.text(x, bottom + 18, f"1e{power}", anchor="middle")
    x = _place(BOUND)
    drawing.line(x, top - 4, x, bottom, "bound")
    drawing.text(x, top - 8, f"bound {BOUND:.0e}", anchor="middle", kind="strong")
    for row, result in enumerate(results):
        y = top + space * row
        name = result.layout.name if result.passed else f"{result.layout.name}: WRONG"
        drawing.text(MARGIN, y + 15, name, kind="strong" if result.passed else "wrong")
        drawing.line(_LEFT, y + 28, _LEFT + _WIDTH, y + 28)
        for number, kind in enumerate(_KINDS):
            if (worst := _worst(result, kind)) is not None:
                drawing.dot(_place(worst.value), y + 28, number, f"{kind} {worst.name}: {worst.value:.2e}")
        if (half := result.worst.get("half precision")) is not None:
            text = f"gradient's error {half.value:.2f} x that of one process, at most {half.bound}"
            drawing.text(MARGIN, y + 49, text, kind="" if result.passed else "wrong")
    return drawing.svg()


def _place(value: float) -> float:
    power = _HIGH if not math.isfinite(value) else math.log10(max(value, 1e-30))
    return _LEFT + _WIDTH * (min(max(power, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
