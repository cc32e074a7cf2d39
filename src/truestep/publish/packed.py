"""Tensors as bytes in chunks: where each chunk ends follows from the tensors' sizes alone, for who sends and who reads.

It is vLLM's rule of packed transfers: a chunk takes tensors in their order until it has more bytes than a size that is
agreed on. The last chunk has what is left.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """A tensor that is announced."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def chunks_of(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    """Divide tensors into chunks of little more than `size` bytes."""
    chunk: list[Entry] = []
    room = size
    for entry in entries:
        chunk.append(entry)
        room -= entry.nbytes
        if room < 0:
            yield chunk
            chunk, room = [], size
    if chunk:
        yield chunk


def update_info(entries: Iterable[Entry]) -> dict[str, Any]:
    """Announce tensors, as vLLM's backend `nccl` reads it."""
    listed = list(entries)
    return {
        "names": [entry.name for entry in listed],
        "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in listed],
        "shapes": [list(entry.shape) for entry in listed],
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)
