"""A checksum of a tensor's bytes that costs less than their copy."""

from typing import Any

import numpy as np
import torch

ROW = 4096  # bytes
BLOCK = 1 << 18  # bytes that are copied and added up at a time, so that they are read from the cache the second time


class Checksum:
    """Sums of 64-bit words: one of all words, and one in which each row of 4 KiB counts as often as its number says.

    Any change of one word shows, and so does another tensor, a missing stretch or rows in another order, unless both
    sums happen to agree. It is made for faults and not for attacks.
    """

    def __init__(self, before: int = 0) -> None:
        """Begin at a tensor's first byte, or behind so many whole rows, which another checksum adds up."""
        self._words = self._rows = np.uint64(0)
        self._next = before + 1

    def add(self, content: Any) -> None:
        """Add bytes, an array of uint8. All but the last ones are whole rows."""
        whole = len(content) - len(content) % ROW
        self._add_rows(content[:whole].view(np.uint64).reshape(-1, ROW // 8))
        if whole < len(content):
            row = np.zeros(ROW, dtype=np.uint8)
            row[: len(content) - whole] = content[whole:]
            self._add_rows(row.view(np.uint64).reshape(1, -1))

    def join(self, other: "Checksum") -> None:
        """Add what another one found in other rows of the same tensor."""
        with np.errstate(over="ignore"):
            self._words = self._words + other._words
            self._rows = self._rows + other._rows

    def _add_rows(self, rows: Any) -> None:
        sums = np.add.reduce(rows, axis=1, dtype=np.uint64)
        numbers = np.arange(self._next, self._next + len(sums), dtype=np.uint64)
        with np.errstate(over="ignore"):  # both are numbers of 64 bits
            self._words = self._words + np.add.reduce(sums)
            self._rows = self._rows + np.add.reduce(sums * numbers)
        self._next += len(sums)

    def __str__(self) -> str:
        return f"{int(self._words):016x}{int(self._rows):016x}"


def bytes_of(tensor: torch.Tensor) -> Any:
    """View a contiguous tensor on the host as an array of uint8."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)


def checksum(tensor: torch.Tensor) -> str:
    """Compute the checksum of a contiguous tensor on the host."""
    content, found = bytes_of(tensor), Checksum()
    for start in range(0, len(content), BLOCK):
        found.add(content[start : start + BLOCK])
    return str(found)
