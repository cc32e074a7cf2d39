"""Packed documents as chunks of equal length, for operations that carry a state from chunk to chunk.

Work inside chunks is done for all chunks at once. The state then passes through the chunks in steps: step i takes chunk
i of every document that has one. A document's last chunk is padded at its end.

Dimensions: S tokens of D documents; N chunks of L tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

_SHORTEST = 16  # least number of tokens in a chunk, also for shorter documents


@dataclass(frozen=True)
class Chunks:
    """The chunks of packed documents, ordered by step. Example: documents of 5 and 70 tokens, in chunks of 64: step 0
    has two chunks, the longer document's first; step 1 has one."""

    index: torch.Tensor  # [N, L] index into S; padding repeats a token
    real: torch.Tensor  # [N, L] True: a token; False: padding
    counts: tuple[int, ...]  # the number of chunks of each step
    order: torch.Tensor  # [D] the documents, those with the most chunks first
    places: torch.Tensor  # [D] each document's index in `order`
    restore: torch.Tensor  # [S] index of each token in the N * L tokens of all chunks

    def arrange(self, values: torch.Tensor, padding: float | None = None) -> torch.Tensor:
        """Arrange tokens' values, [S, ...] -> [N, L, ...]. `padding`: the value at padding; None: padding repeats a
        token's value."""
        rows = values.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)
        if padding is None:
            return rows
        return rows.masked_fill(~self.real.reshape(*self.real.shape, *(1 for _ in values.shape[1:])), padding)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of tokens, [N, L, ...] -> [S, ...]."""
        return rows.flatten(0, 1).index_select(0, self.restore)

    def scan(
        self, states: torch.Tensor, advance: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass states [D, ...] through the documents' chunks. `advance` maps some chunks and the states before them to
        one output per chunk and the states after them. Return the outputs [N, ...] and final states."""
        states = states.index_select(0, self.order)
        outputs, ended, start = [], [], 0
        for count in self.counts:
            if count < len(states):
                ended.append(states[count:])
                states = states[:count]
            output, states = advance(slice(start, start + count), states)
            outputs.append(output)
            start += count
        final = torch.cat([states, *reversed(ended)]).index_select(0, self.places)
        return torch.cat(outputs), final


@functools.lru_cache(maxsize=16)
def make_chunks(spans: tuple[tuple[int, int], ...], most: int, device: torch.device) -> Chunks:
    """Divide documents into chunks of `most` tokens, or fewer if all documents are shorter. `spans`: each document's
    begin and end; together they cover all tokens."""
    lengths = torch.tensor([end - start for start, end in spans])
    starts = torch.tensor([start for start, _ in spans])
    longest = int(lengths.max())
    size = min(most, max(_SHORTEST, 1 << (longest - 1).bit_length()))
    counts = -(-lengths // size)
    order = torch.argsort(counts, descending=True, stable=True)
    steps, rows, ends = [], [], []
    for step in range(int(counts.max())):
        members = order[counts[order] > step]
        steps.append(len(members))
        rows.append(starts[members] + step * size)
        ends.append(starts[members] + lengths[members])
    first, end = torch.cat(rows)[:, None], torch.cat(ends)[:, None]
    index = first + torch.arange(size)
    real = index < end
    restore = torch.empty(int(lengths.sum()), dtype=torch.int64)
    restore[index[real]] = torch.arange(index.numel()).view_as(index)[real]
    places = torch.argsort(order)
    index = torch.minimum(index, end - 1)
    there = (tensor.to(device) for tensor in (index, real, order, places, restore))
    index, real, order, places, restore = there
    return Chunks(index, real, tuple(steps), order, places, restore)
