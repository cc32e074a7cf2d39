"""What the device has to know of each row of a step: one line of 64-bit numbers, that the host writes.

Three of them are float64 in truth: how a row is drawn. The last ones are the pages of the row.
"""

import numpy as np
import torch

from truestep.generate.engine.draw import DrawRows, Truncation

SLOT, LENGTH, PAGE, OFFSET, POSITION, KEY, TEMPERATURE, TOP_P, MIN_P, TOP_K, PAGES = range(11)


def idle_rows(count: int, width: int, nobody: int, spare: int) -> np.ndarray:
    """Give rows that only fill up a batch: they write to a slot and a page that nobody owns."""
    lines = np.zeros((count, PAGES + width), dtype=np.int64)
    lines[:, SLOT], lines[:, LENGTH] = nobody, 1
    lines[:, PAGE] = spare
    lines[:, PAGES:] = spare
    return lines


def draw_fields(key: int, temperature: float, top_p: float, min_p: float, top_k: int) -> np.ndarray:
    """Give what is written from KEY to TOP_K."""
    fields = np.zeros(PAGES - KEY, dtype=np.int64)
    fields[0], fields[4] = key, top_k
    fields[1:4] = np.array([temperature, top_p, min_p]).view(np.int64)
    return fields


def draw_rows(lines: torch.Tensor, truncates: bool) -> DrawRows:
    def floats(column: int) -> torch.Tensor:
        return lines[:, column].view(torch.float64)

    truncation = Truncation(floats(TOP_P).float(), lines[:, TOP_K], floats(MIN_P).float()) if truncates else None
    return DrawRows(lines[:, KEY], lines[:, POSITION], floats(TEMPERATURE), truncation)
