"""CUDA graphs of decode and prefill: one for each batch size. They are kept from one phase of sampling to the next.

A graph reads the addresses of the cache and all arguments of its rows or prompts from fixed memory. Weights change in
place between phases; if a weight's address changes, all graphs are captured again.

Tensor ranks capture and replay the same graphs at the same time, since the graphs contain their all-reduces.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from truestep.generate.engine.attend import KeyPlaces, Past
from truestep.generate.engine.cache import PagedCache
from truestep.generate.engine.rows import PAGES, idle_rows
from truestep.generate.engine.team import Team
from truestep.model.mixers.attention import PackedLayout
from truestep.process import progress
from truestep.ranks.group import clear_at_leave

log = logging.getLogger(__name__)

# Batches of rows are padded to one of these sizes; beyond them, to a multiple of 128. Padding rows cost little: they
# read almost no cache. Another graph costs a tenth of a second, once.
_SIZES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_LEAST_LENGTH = 512

# A prefill pass is padded to one of these sizes. A graph's memory stays allocated while the policy is trained, so there
# are no sizes at which the work takes longer than its launches.
_PROMPT_SIZES = (128, 256, *range(512, 4097, 512))
MOST_GRAPHED = _PROMPT_SIZES[-1]
# Sizes of passes whose chunks also attend to earlier tokens: the tokens of the pass, and all keys that they attend to.
# There are few, because such passes differ in both, and each combination needs a graph.
_LATER_SIZES = (512, 1024, 2048, 4096)
_KEY_SIZES = (8192, 32_768, 131_072)

Decode = Callable[[torch.Tensor, int], torch.Tensor]
Send = Callable[[np.ndarray], torch.Tensor]
Refill = Callable[[torch.Tensor, torch.Tensor], None]
# Its arguments: token ids, positions, pages, offsets; the layout of whole prompts; the keys of chunks that also attend
# to earlier tokens.
ComputePrompts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PackedLayout | None, Past | None], torch.Tensor
]


@dataclass(frozen=True)
class FlatPrompts:
    """Prompts, or chunks of them, packed one after another."""

    ids: np.ndarray  # [T]
    positions: np.ndarray  # [T] in their prompts
    pages: np.ndarray  # [T] page of each token's keys and values
    offsets: np.ndarray  # [T] offset in the page
    bounds: np.ndarray  # [prompts + 1] int32: cumulative lengths
    longest: int
    spare: int  # page of padding tokens
    keys: KeyPlaces | None = None  # None: whole prompts, which attend only to themselves

    def padded(self) -> "FlatPrompts | None":
        """Pad to a size that has a graph: with one prompt of padding tokens, then with empty prompts. None: no size is
        large enough."""
        count, prompts = len(self.ids), len(self.bounds) - 1
        whole = self.keys is None
        size = next((size for size in (_PROMPT_SIZES if whole else _LATER_SIZES) if size >= count), 0)
        counts = (size // 64, size // 8) if whole else (size // 16,)
        most = next((most for most in counts if most > prompts), 0)
        if not size or not most:
            return None
        missing = size - count
        keys = None
        if self.keys is not None:
            end = len(self.keys.pages) + missing
            room = next((room for room in _KEY_SIZES if room >= end), 0)
            if not room:
                return None
            keys = self.keys.padded(room, end, most + 1, self.spare)
        longest = 256
        while longest < max(self.longest, missing):
            longest *= 4 if whole else 16
        zeros = np.zeros(missing, dtype=np.int64)
        return FlatPrompts(
            ids=np.concatenate([self.ids, zeros]),
            positions=np.concatenate([self.positions, np.arange(missing)]),
            pages=np.concatenate([self.pages, zeros + self.spare]),
            offsets=np.concatenate([self.offsets, zeros]),
            bounds=np.concatenate([self.bounds, np.full(most - prompts, size, dtype=np.int32)]),
            longest=longest,
            spare=self.spare,
            keys=keys,
        )


def size_for(rows: int) -> int:
    return next((size for size in _SIZES if size >= rows), -(-rows // 128) * 128)


def length_for(longest: int) -> int:
    """Return the length that a graph is captured for: 512 times a power of four. Longer than needed costs little."""
    length = _LEAST_LENGTH
    while length < longest:
        length *= 4
    return length


class Graphs:
    def __init__(self, place: torch.device, num_layers: int, team: Team, operations: int = 0, addressed: bool = True):
        """`operations` is the number of recurrent operations. `addressed`: they find their states by addresses in
        memory."""
        self._place, self._team, self._addressed = place, team, addressed
        if team.size > 1:
            clear_at_leave(self)  # NCCL cannot destroy a group that a graph still uses
        self._places = torch.zeros(num_layers, 2, dtype=torch.int64, device=place)
        self._state_places = torch.zeros(operations, dtype=torch.int64, device=place)
        self._lines = torch.zeros(0, PAGES, dtype=torch.int64, device=place)
        self.last = torch.zeros(0, dtype=torch.int64, device=place)  # the last drawn token of each slot
        self._weights: tuple[int, ...] = ()
        self._prompts = torch.zeros(4, MOST_GRAPHED, dtype=torch.int64, device=place)
        # Bounds of the prompts, and of their keys.
        self._bounds = torch.zeros(2, MOST_GRAPHED, dtype=torch.int32, device=place)
        self._keys = torch.zeros(2, _KEY_SIZES[-1], dtype=torch.int64, device=place)
        self._made: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._broken: set[str] = set()  # kinds of graphs that could not be captured: rows or prompts

    def begin(self, cache: PagedCache, slots: int, width: int, model: Any, staged: int = 0) -> None:
        """Begin a phase of sampling with a new cache. Drop all graphs if the address of a weight has changed, or of
        states that are not found by address, or if a buffer is too small. `staged` is the address of the buffer for
        routes."""
        cache.locate(self._places, self._state_places)
        fixed = (*model.parameters(), *(() if self._addressed else cache.states))
        weights = (staged, *(tensor.data_ptr() for tensor in fixed))
        size = size_for(slots)
        fits = len(self._lines) >= size and self._lines.shape[1] >= PAGES + width
        if self._team.all(fits and weights == self._weights):
            return
        self.clear()
        self._weights = weights
        if not fits:
            size = max(size, len(self._lines))
            width = max(PAGES + width, self._lines.shape[1])
            self._lines = torch.zeros(size, width, dtype=torch.int64, device=self._place)
            self.last = torch.zeros(size + 1, dtype=torch.int64, device=self._place)

    def clear(self) -> None:
        self._made.clear()

    def __len__(self) -> int:
        return len(self._made)

    @property
    def width(self) -> int:
        """The number of pages of a row for which the buffers have room."""
        return self._lines.shape[1] - PAGES

    def sent(self, rows: int) -> torch.Tensor:
        """Return the lines of the rows that were decoded last, on the device."""
        return self._lines[:rows]

    @property
    def nobody(self) -> int:
        """The slot of rows that only pad a batch."""
        return len(self.last) - 1

    def run(
        self, lines: torch.Tensor, longest: int, truncates: bool, spare: int, refill: Refill, decode: Decode
    ) -> torch.Tensor:
        """Decode rows, given by their lines in host memory. The next step overwrites the returned tensor."""
        length = length_for(longest)
        ours = self._lines[: len(lines)]

        def work() -> torch.Tensor:
            return decode(ours, length)

        key = ("rows", len(lines), length, truncates)
        if key not in self._made:
            ours.copy_(torch.from_numpy(idle_rows(len(lines), ours.shape[1] - PAGES, self.nobody, spare)))
            self._make(key, work)
        if key not in self._made:
            refill(ours, lines)
            return decode(ours, length)
        graph, output = self._made[key]
        refill(ours, lines)
        graph.replay()
        return output

    def run_prompts(self, prompts: FlatPrompts, send: Send, compute: ComputePrompts) -> torch.Tensor | None:
        """Prefill prompts and return their hidden states [T, H], which the next step overwrites. None: there is no
        graph for them."""
        padded = prompts.padded()
        if padded is None:
            return None
        size, documents = padded.ids.shape[0], len(padded.bounds)
        keys, longest = padded.keys, padded.longest
        key = ("prompts", size, documents, longest, *(() if keys is None else (keys.longest,)))
        ours, bounds, others = self._prompts[:, :size], self._bounds[0, :documents], self._bounds[1, :documents]
        ours.copy_(send(np.stack([padded.ids, padded.positions, padded.pages, padded.offsets])))
        bounds.copy_(send(padded.bounds))
        layout, past = PackedLayout(bounds, longest, ()) if keys is None else None, None
        if keys is not None:
            places = self._keys[:, : len(keys.pages)]
            places.copy_(send(np.stack([keys.pages, keys.offsets])))
            others.copy_(send(keys.bounds))
            past = Past(places[0], places[1], (bounds, others), (longest, keys.longest))

        def work() -> torch.Tensor:
            ids, positions, pages, offsets = ours
            # `clone`: compiled layers would be recompiled for a view.
            return compute(ids, positions.clone(), pages, offsets, layout, past)

        if key not in self._made:
            self._make(key, work)
        if key not in self._made:
            return None
        graph, output = self._made[key]
        graph.replay()
        return output

    def _make(self, key: tuple[Any, ...], work: Callable[[], torch.Tensor]) -> None:
        if key[0] in self._broken:
            return
        found, problem = None, "another tensor rank could not make one"
        try:
            with progress.working("compiling the sampler", "graphs"):
                found = self._capture(work)
        except Exception as error:  # errors of drivers, compilers and torch have no common type
            if self._team.size > 1 and isinstance(error, torch.OutOfMemoryError):
                raise  # only this rank is out of memory, and the other ranks may be waiting within a step
            problem = f"{type(error).__name__}: {error}"
            torch.cuda.synchronize(self._place)
        if self._team.all(found is not None) and found is not None:
            self._made[key] = found
            return
        self._broken.add(key[0])
        log.warning("sampling computes %s without CUDA graphs, which is slower: %s", key[0], problem)

    def _capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        stream = torch.cuda.Stream(self._place)
        stream.wait_stream(torch.cuda.current_stream(self._place))
        with torch.cuda.stream(stream):  # a warm-up: compilation and lazy allocations must not be captured
            work()
        torch.cuda.current_stream(self._place).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((made.pool() for made, _ in self._made.values()), None)
        # Other threads may call the driver meanwhile: one allocates pinned memory for checkpoints.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = work()
        return graph, output
