"""A step's metrics as a table for the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def step_table(line: Mapping[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in line.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
    return table
