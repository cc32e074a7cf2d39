"""The results of parity as a table, as JSON, and as a figure of the log-ratio by position in the completion."""

from typing import Any

import numpy as np
from rich.table import Table

from truestep.parity.gap import Parity

_COLUMNS, _ROWS = 24, 21
_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP = 30, 20, 90, 40


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
    """Draw places in the completion as columns and log-ratios as rows; a column's darkest cell has the most labels."""
    left = result.base.left
    reach = max(float(np.quantile(np.abs(left), 0.999)), 1e-6)
    longest = int(result.positions.max()) + 1
    columns = min(_COLUMNS, longest)
    column = result.positions * columns // longest
    row = ((1 - np.clip(left / reach, -1, 1)) / 2 * (_ROWS - 1)).round().astype(int)
    counts = np.zeros((_ROWS, columns))
    np.add.at(counts, (row, column), 1)
    share = counts / counts.max(axis=0, keepdims=True).clip(min=1)
    width, height = _LEFT + columns * _CELL_WIDTH + 30, _TOP + _ROWS * _CELL_HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" fill="#222">log π(trainer) - log π(sampler), by place in the completion</text>',
    ]
    for r, c in np.argwhere(counts):
        x, y = _LEFT + c * _CELL_WIDTH, _TOP + r * _CELL_HEIGHT
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_CELL_WIDTH - 1}" height="{_CELL_HEIGHT - 1}" fill="#4053d3" '
            f'fill-opacity="{0.08 + 0.92 * share[r, c]:.2f}"><title>{int(counts[r, c])} labels</title></rect>'
        )
    for r, value in ((0, reach), (_ROWS // 2, 0.0), (_ROWS - 1, -reach)):
        beside = _TOP + (r + 0.7) * _CELL_HEIGHT
        parts.append(f'<text x="{_LEFT - 8}" y="{beside:.0f}" text-anchor="end" fill="#666">{value:+.1e}</text>')
    bottom = _TOP + _ROWS * _CELL_HEIGHT + 20
    right = _LEFT + columns * _CELL_WIDTH
    parts.append(f'<text x="{_LEFT}" y="{bottom}" fill="#666">first label</text>')
    parts.append(f'<text x="{right}" y="{bottom}" text-anchor="end" fill="#666">label {longest}</text>')
    return "\n".join([*parts, "</svg>", ""])
