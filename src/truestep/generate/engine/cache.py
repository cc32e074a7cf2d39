"""The paged KV cache, and the states of recurrent layers. Their memory is allocated for one phase of sampling.

Dimensions: K key-value heads, E head size.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from truestep.model.mixers.recurrence import LayerState

_ALIGNED = 256  # bytes: alignment of each layer's keys and values
_SHARE = 0.9  # the largest share of the free memory that the cache takes; activations and logits need the rest


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores: keys and values of each token, and states of each sequence."""

    heads: int  # key-value heads; 0: the layer does not attend
    key_size: int
    value_size: int
    queries: int  # query heads
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    states: tuple[LayerState, ...] = ()  # one for each recurrent operation, in the order of their calls

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_size + self.value_size)


@dataclass
class PagedCache:
    """Keys, values and states of all layers. Rows that only pad a batch write to an extra page (the last) and to an
    extra state (the first)."""

    keys: list[torch.Tensor]  # for each layer: [pages + 1, K, tokens of a page, E]
    values: list[torch.Tensor]
    places: torch.Tensor | None = None  # [layers, 2] device addresses of keys and values, for kernels
    states: list[torch.Tensor] = field(default_factory=list)  # for each recurrent operation: [states + 1, *shape]
    state_places: torch.Tensor | None = None  # [operations] their device addresses
    routes: torch.Tensor | None = None  # [pages + 1, tokens of a page, L, k] experts; None: they are not recorded

    @staticmethod
    def make(
        layers: Sequence[LayerShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        zeros: bool = True,
        states: int = 0,
    ) -> "PagedCache":
        """Allocate the cache. `zeros`: clear the pages. Plain torch needs this, because it multiplies masked values by
        0, so they must be finite. Kernels do not read masked values. `states`: how many sequences have a state."""
        shapes = [
            (pages + 1, layer.heads, page_size, size) for layer in layers for size in (layer.key_size, layer.value_size)
        ]
        try:
            made = _tensors(shapes, dtype, device)
        except torch.OutOfMemoryError:  # free memory may be fragmented
            made = [_tensors([shape], dtype, device)[0] for shape in shapes]
        for tensor in made if zeros else ():
            tensor.zero_()
        kept = [
            torch.empty(states + 1, *state.shape, dtype=state.dtype, device=device)
            for layer in layers
            for state in layer.states
        ]
        for tensor in kept:
            tensor[0].zero_()
        return PagedCache(made[::2], made[1::2], states=kept)

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def spare(self) -> int:
        """The extra page, which no completion uses."""
        return self.keys[0].shape[0] - 1

    def locate(self, places: torch.Tensor | None = None, state_places: torch.Tensor | None = None) -> None:
        """Store the cache's addresses on the device, for kernels: in these tensors, or in new ones if they are None. A
        CUDA graph is used with several caches, one after another, so its kernels read the addresses from memory."""
        device, pools = self.keys[0].device, torch.tensor([pool.data_ptr() for pool in self.states], dtype=torch.int64)
        self.places = self.addresses().to(device) if places is None else places.copy_(self.addresses())
        self.state_places = pools.to(device) if state_places is None else state_places.copy_(pools)

    def addresses(self) -> torch.Tensor:  # [layers, 2] on the host
        """Return the addresses of each layer's keys and values."""
        return torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in zip(self.keys, self.values, strict=True)])

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for pool in (*self.keys, *self.values, *(() if self.routes is None else (self.routes,))):
            pool.index_copy_(0, target, pool.index_select(0, source))

    def copy_states(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for pool in self.states:
            pool.index_copy_(0, target, pool.index_select(0, source))


def _tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Allocate all tensors at once: a GPU allocation takes long, whatever its size."""
    counts = [math.prod(shape) for shape in shapes]
    step = _ALIGNED // dtype.itemsize
    rooms = [-(-count // step) * step for count in counts]
    parts = torch.empty(sum(rooms), dtype=dtype, device=device).split(rooms)
    return [part[:count].view(shape) for part, count, shape in zip(parts, counts, shapes, strict=True)]


def store(
    cache: PagedCache,
    layer: int,
    pages: torch.Tensor,  # [T]
    offsets: torch.Tensor,  # [T] in their pages
    k: torch.Tensor,  # [T, K, E]
    v: torch.Tensor,  # [T, K, E]
) -> None:
    """Write the keys and values of tokens to their pages."""
    cache.keys[layer][pages, :, offsets] = k
    cache.values[layer][pages, :, offsets] = v


def gather(
    cache: PagedCache,
    layer: int,
    pages: torch.Tensor,  # [Y]
    offsets: torch.Tensor,  # [Y] in their pages
) -> tuple[torch.Tensor, torch.Tensor]:  # [Y, K, E] each
    """Copy the keys and values of tokens from their pages."""
    return cache.keys[layer][pages, :, offsets], cache.values[layer][pages, :, offsets]


def page_bytes(layers: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    return page_size * dtype.itemsize * sum(layer.numbers for layer in layers)


def state_bytes(layers: Sequence[LayerShape]) -> int:
    return sum(math.prod(state.shape) * state.dtype.itemsize for layer in layers for state in layer.states)


def pages_that_fit(wanted: int, bytes_each: int, room: float) -> int:
    """Return how many of the `wanted` pages fit into `room` bytes; at least 1."""
    return max(1, min(wanted, int(room / max(bytes_each, 1)) - 1))


def states_that_fit(rows: int, bytes_each: int, pages_bytes: int, room: float) -> int:
    """Return the number of sequences for which states are allocated: `rows` completions in flight, some prompts, and up
    to `rows` more whose states are kept if memory is left beside the pages. If the pages and the states in flight do
    not fit together, both are reduced in the same proportion; at least 2 states."""
    if not bytes_each:
        return 0
    needed = rows + rows // 8 + 1
    room -= bytes_each  # the extra one
    left = room - pages_bytes - needed * bytes_each
    if left < 0:
        return max(2, int(needed * room / (pages_bytes + needed * bytes_each)))
    return needed + min(rows, int(left / bytes_each))


def free_bytes(device: torch.device) -> float:
    """Return how much memory the cache may take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return _SHARE * (free + unused)
    try:
        return 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # the system does not report its free memory
        return 2.0 * 2**30
