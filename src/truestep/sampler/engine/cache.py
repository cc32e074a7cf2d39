"""Keys and values of all running completions, in pages that are taken for a phase of sampling and given back after it.

Dimensions: K key-value heads, E head size.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SHARE = 0.9  # of the free memory that the cache may take: activations and logits need some, too


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token, and how it attends."""

    heads: int
    key_size: int
    value_size: int
    queries: int
    window: int | None = None
    softcap: float | None = None

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_size + self.value_size)


@dataclass
class PagedCache:
    """One page more than asked for: rows that fill up a batch write to the last one."""

    keys: list[torch.Tensor]  # of each layer: [pages + 1, K, tokens of a page, E]
    values: list[torch.Tensor]
    places: torch.Tensor | None = None  # [layers, 2] the addresses of both, on the device: for kernels

    @staticmethod
    def make(
        layers: Sequence[LayerShape], pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> "PagedCache":
        def some(layer: LayerShape, size: int) -> torch.Tensor:
            # Zeros: what attention masks away is multiplied by 0, and must be finite.
            return torch.zeros(pages + 1, layer.heads, page_size, size, dtype=dtype, device=device)

        return PagedCache(
            [some(layer, layer.key_size) for layer in layers], [some(layer, layer.value_size) for layer in layers]
        )

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def spare(self) -> int:
        """The page that nobody owns."""
        return self.keys[0].shape[0] - 1

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def locate(self, places: torch.Tensor | None = None) -> None:
        """Tell kernels where the cache is: in memory of its own, or in what is given."""
        self.places = self.addresses().to(self.keys[0].device) if places is None else places.copy_(self.addresses())

    def addresses(self) -> torch.Tensor:  # [layers, 2] on the host
        """Give the places of each layer's keys and values, for kernels that outlive the cache in a CUDA graph."""
        return torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in zip(self.keys, self.values, strict=True)])

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for pool in (*self.keys, *self.values):
            pool.index_copy_(0, target, pool.index_select(0, source))


def store(
    cache: PagedCache,
    layer: int,
    pages: torch.Tensor,  # [T]
    offsets: torch.Tensor,  # [T] in their pages
    k: torch.Tensor,  # [T, K, E]
    v: torch.Tensor,  # [T, K, E]
) -> None:
    """Write keys and values of tokens to their pages."""
    cache.keys[layer][pages, :, offsets] = k
    cache.values[layer][pages, :, offsets] = v


def page_bytes(layers: Sequence[LayerShape], page_size: int, dtype: torch.dtype) -> int:
    return page_size * dtype.itemsize * sum(layer.numbers for layer in layers)


def pages_that_fit(wanted: int, bytes_each: int, device: torch.device, most_bytes: int | None = None) -> int:
    """Give as many pages as are wanted, or as the memory that is free now holds."""
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
    except (ValueError, OSError):  # not on every system
        return 2.0 * 2**30
