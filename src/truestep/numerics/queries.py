"""The queries of a pass of attention: which tokens they are of, and where each sequence's keys are.

Dimensions: S sequences, P pages of a sequence, N tiles of queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

_PAGES = {"cuda": 64}
Send = Callable[[np.ndarray], torch.Tensor]


def page_of(device: torch.device) -> int:
    """Give the tokens of a page, which are the same in every pass on a device."""
    return _PAGES.get(device.type, 16)


@dataclass(frozen=True)
class Span:
    """Tokens of the pass that follow one another in a sequence."""

    first: int  # of the pass's tokens
    count: int
    start: int  # tokens of the sequence before it
    sequence: int  # of the table


@dataclass
class Queries:
    """The queries of a pass, and the pages of each sequence."""

    table: torch.Tensor  # [S, P] int64
    spans: list[Span]
    send: Send
    rows: torch.Tensor | None = None  # [S] instead of spans: each sequence has one token, and so many before it
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    def tiles(self, tokens: int) -> torch.Tensor:  # [4, N] int64
        """Give the tiles of so many tokens each, which programs attend with: the first of the pass's tokens, their
        number, the tokens of the sequence before it, and the sequence."""
        if tokens not in self._tiles and self.rows is not None:
            numbers = torch.arange(len(self.rows), device=self.rows.device)
            self._tiles[tokens] = torch.stack([numbers, torch.ones_like(numbers), self.rows, numbers])
        if tokens not in self._tiles:
            cut = [
                (span.first + at, min(tokens, span.count - at), span.start + at, span.sequence)
                for span in self.spans
                for at in range(0, span.count, tokens)
            ]
            self._tiles[tokens] = self.send(np.array(cut, dtype=np.int64).reshape(-1, 4).T.copy())
        return self._tiles[tokens]
