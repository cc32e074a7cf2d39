"""Each wrong difference is in a cell of the table, in red, and in the figure."""

from __future__ import annotations

import pytest

from truestep.tools.verify.difference import Difference
from truestep.tools.verify.judge import LayoutResult
from truestep.tools.verify.layouts import Layout
from truestep.tools.verify.report import figure, table

FINE = {kind: Difference(1, kind, kind, 1e-7) for kind in ("loss", "metric", "gradient", "log-prob", "update")}
OF_UPDATES = ("moment", "weight decay", "clipping", "learning rate", "frozen", "first weights")
SHOWN = {
    **{kind: kind for kind in FINE},
    **dict.fromkeys(("count", "routing", "documents"), "metric"),
    **dict.fromkeys(OF_UPDATES, "update"),
    "half precision": "gradient",
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_wrong_difference_has_a_red_cell(kind: str) -> None:
    wrong = FINE | {kind: Difference(2, kind, "is wrong", 3.0)}
    layout = Layout("FSDP 2", 2, {})
    made = table([LayoutResult(layout, wrong)])
    red = [
        str(column.header)
        for column in made.columns
        for cell in column.cells
        if getattr(cell, "style", "") == "bold red" and str(cell) != "WRONG"
    ]
    assert red == [SHOWN[kind]]
    if kind != "half precision":
        assert "is wrong: 3.00e" in figure([LayoutResult(layout, wrong)])
    right = table([LayoutResult(layout, FINE | {kind: Difference(2, kind, "is right", 0.0)})])
    assert not [cell for column in right.columns for cell in column.cells if getattr(cell, "style", "") == "bold red"]
