"""A checksum of a tensor's bytes that costs less than their copy."""

from typing import Any

import numpy as np
import torch

ROW = 4096  # bytes
_BLOCK = 1 << 19  # bytes that are copied and added up at a time, so that they are read from the cache the second time


class Checksum:
    """Sums of 64-bit words: one of all words, and one in which each row of 4 KiB counts as often as its number says.

    Any change of one word shows, and so does another tensor, a missing stretch or rows in another order, unless both
    sums happen to agree. It is made for faults and not for attacks.
    """

    def __init__(self, before: int = 0) -> None:
        """Begin at a tensor's first byte, or behind so many whole rows, which another checksum adds up."""
        self._words = self._rows = np.uint64(0)
        self._next = before + 1

    def add(self, content: Any, copy_to: Any = None) -> None:
        """Add bytes, an array of uint8, and copy them to another one. All but the last ones are whole rows."""
        sums = np.zeros(-(-len(content) // ROW), dtype=np.uint64)
        for begin in range(0, len(content), _BLOCK):
            block = content[begin : begin + _BLOCK]
            if copy_to is not None:
                copy_to[begin : begin + _BLOCK] = block
            whole = len(block) - len(block) % ROW
            first = begin // ROW
            np.add.reduce(
                block[:whole].view(np.uint64).reshape(-1, ROW // 8), axis=1, out=sums[first : first + whole // ROW]
            )
            if whole < len(block):
                row = np.zeros(ROW, dtype=np.uint8)
                row[: len(block) - whole] = block[whole:]
                sums[-1] = np.add.reduce(row.view(np.uint64))
        self._add_sums(sums)

    def join(self, other: "Checksum") -> None:
        """Add what another one found in other rows of the same tensor."""
        with np.errstate(over="ignore"):
            self._words = self._words + other._words
            self._rows = self._rows + other._rows

    def _add_sums(self, sums: Any) -> None:
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
    found = Checksum()
    found.add(bytes_of(tensor))
    return str(found)
