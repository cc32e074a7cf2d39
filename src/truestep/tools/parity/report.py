"""The results of parity as a table, as JSON, and as a figure of the log-ratio by position in the completion."""

from typing import Any

import numpy as np
from rich.table import Table

from truestep.report.drawing import MARGIN, WIDTH, Drawing
from truestep.tools.parity.gap import Parity

_COLUMNS, _ROWS = 24, 21
_CELL, _LEFT, _TOP = 14, 76, 80


def table(result: Parity) -> Table:
    rows = Table("cause", "with only this switched", box=None, header_style="bold", pad_edge=False)
    for name in ("mean gap", "largest", "explains"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_row("as it is", "", f"{result.base.gap:.1e}", f"{result.base.worst:.1e}", "", style="bold")
    for tried in result.tried:
        share = result.explained(tried)
        cells = (tried.cause, tried.switch, f"{tried.gap:.1e}", f"{tried.worst:.1e}")
        rows.add_row(*cells, f"{share:.0%}" if share > 0 else "", style="" if share > 0 else "dim")
    return rows


def as_json(result: Parity) -> dict[str, Any]:
    return {
        "documents": result.documents,
        "labels": result.labels,
        "mean_gap": result.base.gap,
        "largest_gap": result.base.worst,
        "rounding_alone": result.noise,
        "verdict": result.verdict,
        "worst_token": vars(result.worst),
        "causes": [
            {
                "cause": tried.cause,
                "switch": tried.switch,
                "mean_gap_left": tried.gap,
                "largest_gap_left": tried.worst,
                "explained": result.explained(tried),
                "advice": tried.advice,
            }
            for tried in result.tried
        ],
    }


def figure(result: Parity) -> str:
    """Draw a histogram of log-ratios (rows) by position in the completion (columns). A cell's shade is relative to the
    cell with the most labels in its column."""
    left = result.base.left
    reach = max(float(np.quantile(np.abs(left), 0.999)), 1e-6)
    longest = int(result.positions.max()) + 1
    columns = min(_COLUMNS, longest)
    column = result.positions * columns // longest
    row = ((1 - np.clip(left / reach, -1, 1)) / 2 * (_ROWS - 1)).round().astype(int)
    counts = np.zeros((_ROWS, columns))
    np.add.at(counts, (row, column), 1)
    share = counts / counts.max(axis=0, keepdims=True).clip(min=1)
    drawing = Drawing(
        "Trainer against sampler", "log \u03c0(trainer) \u2212 log \u03c0(sampler) of each label, in nats"
    )
    drawing.text(MARGIN, 66, f"mean size {result.base.gap:.1e}; {len(left):,} labels of {result.documents:,} documents")
    width = (WIDTH - _LEFT - MARGIN) / columns
    bottom = _TOP + _ROWS * _CELL
    drawing.height = bottom + 66
    for r, c in np.argwhere(counts):
        first, last = -(-int(c) * longest // columns), -(-int(c + 1) * longest // columns) - 1
        place = f"label {first + 1}" if last <= first else f"labels {first + 1} to {last + 1}"
        title = f"{place}: {int(counts[r, c])} labels at {reach * (1 - 2 * r / (_ROWS - 1)):+.1e}"
        drawing.box(_LEFT + c * width, _TOP + r * _CELL, width - 1, _CELL - 1, 0.08 + 0.92 * share[r, c], title)
    for r, value in ((0, reach), (_ROWS // 2, 0.0), (_ROWS - 1, -reach)):
        text = f"{value:+.1e}".replace("e-0", "e-") if value else "0"
        drawing.text(_LEFT - 6, _TOP + (r + 0.75) * _CELL, text, anchor="end")
    drawing.text(_LEFT, bottom + 18, "first label")
    drawing.text(WIDTH - MARGIN, bottom + 18, f"label {longest}", anchor="end")
    for number, shade in enumerate((0.08, 0.3, 0.55, 0.8, 1.0)):
        drawing.box(_LEFT + 20 * number, bottom + 34, 19, 12, shade, "")
    drawing.text(_LEFT + 108, bottom + 45, "few to most labels of a column")
    return drawing.svg()
