"""CUDA graphs of steps that decode: one for each size of a batch, kept from phase to phase.

A graph reads the places of the cache and everything about its rows from memory that stays where it is. Weights change
in place between phases; where they lie elsewhere, graphs are made anew.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from truestep.sampler.engine.cache import PagedCache
from truestep.sampler.engine.rows import PAGES, idle_rows

log = logging.getLogger(__name__)

# Batches are filled up to one of these sizes; beyond them, to a multiple of 128. Rows that fill up cost little: they
# read no cache. A graph more costs a tenth of a second, once.
_SIZES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_LEAST_LENGTH = 512

Decode = Callable[[torch.Tensor, int], torch.Tensor]


def size_for(rows: int) -> int:
    return next((size for size in _SIZES if size >= rows), -(-rows // 128) * 128)


def length_for(longest: int) -> int:
    """Give the length that a graph is made for: 512 times a power of four. Programs beyond a row's end cost little."""
    length = _LEAST_LENGTH
    while length < longest:
        length *= 4
    return length


class Graphs:
    def __init__(self, place: torch.device, num_layers: int):
        self._place = place
        self._places = torch.zeros(num_layers, 2, dtype=torch.int64, device=place)
        self._lines = torch.zeros(0, PAGES, dtype=torch.int64, device=place)
        self.last = torch.zeros(0, dtype=torch.int64, device=place)  # of each slot, the token drawn last
        self._weights: tuple[int, ...] = ()
        self._made: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._broken = False

    def begin(self, cache: PagedCache, slots: int, width: int, model: Any) -> None:
        """Begin a phase with a new cache."""
        cache.locate(self._places)
        weights = tuple(parameter.data_ptr() for parameter in model.parameters())
        size = size_for(slots)
        fits = len(self._lines) >= size and self._lines.shape[1] >= PAGES + width
        if fits and weights == self._weights:
            return
        self._made.clear()
        self._weights = weights
        if not fits:
            size = max(size, len(self._lines))
            width = max(PAGES + width, self._lines.shape[1])
            self._lines = torch.zeros(size, width, dtype=torch.int64, device=self._place)
            self.last = torch.zeros(size + 1, dtype=torch.int64, device=self._place)

    def __len__(self) -> int:
        return len(self._made)

    @property
    def nobody(self) -> int:
        """The slot of rows that only fill up a batch."""
        return len(self.last) - 1

    def run(self, lines: torch.Tensor, longest: int, truncates: bool, spare: int, decode: Decode) -> torch.Tensor:
        """Decode rows. The result lies in memory that the next step may write to."""
        length = length_for(longest)
        key = (len(lines), length, truncates)
        if key not in self._made and not self._broken:
            try:
                self._made[key] = self._make(len(lines), length, spare, decode)
            except Exception as error:  # a driver's, a compiler's or torch's own: they have no common type
                self._broken = True
                log.warning("decoding runs without CUDA graphs, which is slower: %s: %s", type(error).__name__, error)
                torch.cuda.synchronize(self._place)
        if self._broken:
            return decode(lines, length)
        graph, output = self._made[key]
        self._lines[: len(lines), : lines.shape[1]].copy_(lines)
        graph.replay()
        return output

    def _make(self, size: int, length: int, spare: int, decode: Decode) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        lines = self._lines[:size]
        idle: np.ndarray = idle_rows(size, self._lines.shape[1] - PAGES, self.nobody, spare)
        lines.copy_(torch.from_numpy(idle))
        stream = torch.cuda.Stream(self._place)
        stream.wait_stream(torch.cuda.current_stream(self._place))
        with torch.cuda.stream(stream):  # what is compiled or made at a first use must not be so in the graph
            decode(lines, length)
        torch.cuda.current_stream(self._place).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((made.pool() for made, _ in self._made.values()), None)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            output = decode(lines, length)
        return graph, output
