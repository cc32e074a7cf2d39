"""The arguments of each row of a step, packed by the host as a line of int64 numbers, so that one copy sends them.

Temperature, top_p and min_p are float64 numbers stored as int64. The columns from PAGES on are the row's page table.
"""

from collections.abc import Sequence

import numpy as np
import torch

from truestep.generate.engine.draw import DrawRows, Truncation
from truestep.generate.engine.steps import Row

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


class RowTables:
    """The pages and the draw options of each slot."""

    def __init__(self, slots: int, width: int, page_size: int, spare: int):
        self._page_size, self._spare = page_size, spare
        self._pages = np.full((slots, width), spare)
        self._known = np.zeros(slots, dtype=np.int64)  # how many pages of each slot are in `_pages`
        self._fields = np.zeros((slots, PAGES - KEY), dtype=np.int64)

    def begin(self, slot: int, fields: np.ndarray) -> np.ndarray:
        """Assign a slot to a completion. Return its columns KEY to TOP_K."""
        self._fields[slot], self._known[slot] = fields, 0
        return fields

    def lines(self, rows: Sequence[Row], size: int, width: int, nobody: int) -> np.ndarray:
        """Return the arguments of each row, with idle rows up to `size`. `width`: pages of a row."""
        count = len(rows)
        for row in rows:
            known, now = self._known[row.slot], len(row.pages)
            if known < now:
                self._pages[row.slot, known:now] = row.pages[known:]
                self._known[row.slot] = now
        slots = np.fromiter((row.slot for row in rows), np.int64, count)
        lengths = np.fromiter((row.length for row in rows), np.int64, count)
        page, offset = np.divmod(lengths - 1, self._page_size)
        lines = idle_rows(size, width, nobody, self._spare)
        ours = lines[:count]
        ours[:, SLOT], ours[:, LENGTH] = slots, lengths
        ours[:, PAGE], ours[:, OFFSET] = self._pages[slots, page], offset
        ours[:, POSITION] = np.fromiter((row.position for row in rows), np.int64, count)
        ours[:, STATE] = np.fromiter((row.state for row in rows), np.int64, count)
        ours[:, KEY:PAGES] = self._fields[slots]
        tables = self._pages[slots, :width]
        ours[:, PAGES : PAGES + tables.shape[1]] = tables
        return lines
