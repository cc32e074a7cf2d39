"""Blocks of a weight's rows: consecutive elements that share a scale (8-bit states). Cuts between ranks never divide a
block."""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

BLOCK = 256
PARTS = 16  # a row has gcd(columns, PARTS) parts, and no block crosses the border between two parts


class ScaleBlocks(NamedTuple):
    """The division of a row into parts, and of each part into blocks. A part's last block may be shorter."""

    part: int  # elements per part
    blocks: int  # blocks per part
    size: int  # elements per block

    @staticmethod
    def of(columns: int) -> "ScaleBlocks":
        part = columns // math.gcd(columns, PARTS)
        blocks = -(-part // BLOCK)
        return ScaleBlocks(part, blocks, -(-part // blocks))

    def of_row(self, columns: int) -> int:
        """Return the number of blocks in `columns` columns."""
        return columns // self.part * self.blocks

    def fold(self, rows: torch.Tensor) -> torch.Tensor:  # [R, C] -> [R, blocks, size]
        parts = rows.reshape(len(rows), -1, self.part)
        missing = self.blocks * self.size - self.part
        return pad(parts, (0, missing)).reshape(len(rows), -1, self.size)

    def unfold(self, blocks: torch.Tensor) -> torch.Tensor:  # [R, blocks, size] -> [R, C]
        parts = blocks.reshape(len(blocks), -1, self.blocks * self.size)
        return parts[..., : self.part].reshape(len(blocks), -1)
