"""The arguments of each row of a step, packed by the host as a line of int64 numbers, so that one copy sends them.

Temperature, top_p and min_p are float64 numbers stored as int64. The columns from PAGES on are the row's page table.
"""

import numpy as np
import torch

from truestep.generate.engine.draw import DrawRows, Truncation

SLOT, LENGTH, PAGE, OFFSET, POSITION, STATE, KEY, TEMPERATURE, TOP_P, MIN_P, TOP_K, PAGES = range(12)


def idle_rows(count: int, width: int, nobody: int, spare: int) -> np.ndarray:
    """Return rows that pad a batch: they write to the slot `nobody`, the page `spare` and the state 0, which no
    completion uses."""
    lines = np.zeros((count, PAGES + width), dtype=np.int64)
    lines[:, SLOT], lines[:, LENGTH] = nobody, 1
    lines[:, PAGE] = spare
    lines[:, PAGES:] = spare
    return lines


def draw_fields(key: int, temperature: float, top_p: float, min_p: float, top_k: int) -> np.ndarray:
    """Return a row's columns KEY to TOP_K."""
    fields = np.zeros(PAGES - KEY, dtype=np.int64)
    fields[0], fields[4] = key, top_k
    fields[1:4] = np.array([temperature, top_p, min_p]).view(np.int64)
    return fields


def draw_rows(lines: torch.Tensor, truncates: bool) -> DrawRows:
    def floats(column: int) -> torch.Tensor:
        return lines[:, column].view(torch.float64)

    truncation = Truncation(floats(TOP_P).float(), lines[:, TOP_K], floats(MIN_P).float()) if truncates else None
    return DrawRows(lines[:, KEY], lines[:, POSITION], floats(TEMPERATURE), truncation)
