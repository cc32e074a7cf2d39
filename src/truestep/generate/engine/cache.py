"""The paged KV cache. Its memory is allocated for one phase of sampling.

Dimensions: K key-value heads, E head size.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNED = 256  # bytes: alignment of each layer's keys and values
_SHARE = 0.9  # most of the free memory that the cache takes; activations and logits need the rest


@dataclass(frozen=True)
class LayerShape:
    """The attention shape of one layer."""

    heads: int  # key-value heads
    key_size: int
    value_size: int
    queries: int  # query heads
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_size + self.value_size)


@dataclass
class PagedCache:
    """Keys and values of all layers. There is one extra page, the last: rows that only pad a batch write to it."""

    keys: list[torch.Tensor]  # for each layer: [pages + 1, K, tokens of a page, E]
    values: list[torch.Tensor]
    places: torch.Tensor | None = None  # [layers, 2] device addresses of keys and values, for kernels

    @staticmethod
    def make(
        layers: Sequence[LayerShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        zeros: bool = True,
    ) -> "PagedCache":
        """Allocate the cache. `zeros`: clear it, since plain torch multiplies masked values by 0, so that they must be
        finite. Kernels do not read masked values."""
        shapes = [
            (pages + 1, layer.heads, page_size, size) for layer in layers for size in (layer.key_size, layer.value_size)
        ]
        try:
            made = _tensors(shapes, dtype, device)
        except torch.OutOfMemoryError:  # free memory may be fragmented
            made = [_tensors([shape], dtype, device)[0] for shape in shapes]
        for tensor in made if zeros else ():
            tensor.zero_()
        return PagedCache(made[::2], made[1::2])

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def spare(self) -> int:
        """The extra page, which no completion uses."""
        return self.keys[0].shape[0] - 1

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def locate(self, places: torch.Tensor | None = None) -> None:
        """Store the cache's addresses on the device, for kernels: in `places`, or in a new tensor if it is None."""
        self.places = self.addresses().to(self.keys[0].device) if places is None else places.copy_(self.addresses())

    def addresses(self) -> torch.Tensor:  # [layers, 2] on the host
        """Return the addresses of each layer's keys and values. A CUDA graph outlives the cache, so its kernels read
        them from memory."""
        return torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in zip(self.keys, self.values, strict=True)])

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for pool in (*self.keys, *self.values):
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


def page_bytes(layers: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    return page_size * dtype.itemsize * sum(layer.numbers for layer in layers)


def pages_that_fit(wanted: int, bytes_each: int, device: torch.device, most_bytes: int | None = None) -> int:
    """Return how many of the `wanted` pages fit into `most_bytes`, or into free memory if that is None; at least 1."""
    room = _free_bytes(device) if most_bytes is None else most_bytes
    return max(1, min(wanted, int(room / bytes_each) - 1))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return _SHARE * (free + unused)
    try:
        return 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # the system does not tell
        return 2.0 * 2**30
