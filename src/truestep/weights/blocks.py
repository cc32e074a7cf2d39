"""Blocks of a weight's rows: neighbours that share a scale, and that no rank's cut comes between."""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

BLOCK = 256
PARTS = 16  # of a row: blocks never cross their borders


class Blocks(NamedTuple):
    """How a row is divided: into parts, and each part into blocks, of which its last may be shorter."""

    part: int  # numbers of a part
    blocks: int  # of a part
    size: int  # numbers of a block

    @staticmethod
    def of(columns: int) -> "Blocks":
        part = columns // math.gcd(columns, PARTS)
        blocks = -(-part // BLOCK)
        return Blocks(part, blocks, -(-part // blocks))

    def of_row(self, columns: int) -> int:
        """Count the blocks of so many columns."""
        return columns // self.part * self.blocks

    def fold(self, rows: torch.Tensor) -> torch.Tensor:  # [R, C] -> [R, blocks, size]
        parts = rows.reshape(len(rows), -1, self.part)
        missing = self.blocks * self.size - self.part
        return pad(parts, (0, missing)).reshape(len(rows), -1, self.size)

    def unfold(self, blocks: torch.Tensor) -> torch.Tensor:  # [R, blocks, size] -> [R, C]
        parts = blocks.reshape(len(blocks), -1, self.blocks * self.size)
        return parts[..., : self.part].reshape(len(blocks), -1)
