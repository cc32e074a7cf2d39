"""Packing of tensors into chunks of bytes. Sender and receiver compute the same chunks from the tensors' sizes.

This is vLLM's rule for packed transfers: a chunk takes tensors in order until it has more bytes than an agreed size.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch


class Entry(NamedTuple):
    """An announced tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def chunks_of(entries: Iterable[Entry], size: int) -> Iterator[list[Entry]]:
    """Divide tensors into chunks. A chunk ends with the tensor that makes it larger than `size` bytes; the last chunk
    may be smaller."""
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
    """Return the `update_info` of vLLM's backend `nccl` that announces the tensors."""
    listed = list(entries)
    return {
        "names": [entry.name for entry in listed],
        "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in listed],
        "shapes": [list(entry.shape) for entry in listed],
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)
