"""The queries of an attention pass: the sequence and position of each token, and the KV-cache pages of each sequence.

Dimensions: S sequences, P pages of a sequence, N tiles of queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

_PAGES = {"cuda": 64}
Send = Callable[[np.ndarray], torch.Tensor]


def page_of(device: torch.device) -> int:
    """Return the number of tokens in a page. It is the same for every pass on a device."""
    return _PAGES.get(device.type, 16)


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a pass."""

    first: int  # index of its first token in the pass
    count: int
    start: int  # position of its first token in the sequence
    sequence: int  # row of `table`


@dataclass
class Queries:
    """The queries of a pass, and the pages of each sequence."""

    table: torch.Tensor  # [S, P] int64
    spans: list[Span]
    send: Send
    rows: torch.Tensor | None = None  # [S] in decode, instead of spans: the position of each sequence's single token
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    def tiles(self, tokens: int) -> torch.Tensor:  # [4, N] int64
        """Return tiles of at most `tokens` tokens, one per program: index of the first token in the pass, number of
        tokens, position of the first token, sequence."""
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
