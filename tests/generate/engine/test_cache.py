"""The cache: one allocation, in which every layer has a place of its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from truestep.generate.engine import cache as cache_module
from truestep.generate.engine.attend import places_of
from truestep.generate.engine.cache import LayerShape, PagedCache, store

LAYERS = [LayerShape(3, 5, 7, 6), LayerShape(1, 64, 16, 4, window=9), LayerShape(2, 8, 8, 2)]
CPU = torch.device("cpu")


def places(cache: PagedCache) -> list[tuple[int, int]]:
    """Give from where to where each of the cache's tensors lies."""
    tensors = (*cache.keys, *cache.values)
    return sorted((one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layers_lie_side_by_side_in_one_allocation(dtype: torch.dtype) -> None:
    cache = PagedCache.make(LAYERS, 3, 5, dtype, CPU)
    for layer, keys, values in zip(LAYERS, cache.keys, cache.values, strict=True):
        assert keys.shape == (4, layer.heads, 5, layer.key_size)
        assert values.shape == (4, layer.heads, 5, layer.value_size)
        assert keys.is_contiguous() and values.is_contiguous() and keys.dtype == dtype
        assert not keys.any() and not values.any()
    found = places(cache)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(found)), "none overlaps another"
    assert all((begin - found[0][0]) % 256 == 0 for begin, _ in found)
    assert len({one.untyped_storage().data_ptr() for one in (*cache.keys, *cache.values)}) == 1
    assert cache.page_size == 5 and cache.spare == 3
    held = sum(one.nbytes for one in (*cache.keys, *cache.values))
    assert held == sum(layer.numbers for layer in LAYERS) * 4 * 5 * dtype.itemsize
    assert cache.addresses().tolist() == [
        [k.data_ptr(), v.data_ptr()] for k, v in zip(cache.keys, cache.values, strict=True)
    ]


def test_what_is_written_to_a_layer_changes_no_other() -> None:
    cache = PagedCache.make(LAYERS, 3, 5, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    pages, offsets = torch.tensor([0, 3, 1]), torch.tensor([0, 4, 2])
    given = []
    for number, layer in enumerate(LAYERS):
        k, v = (torch.randn(3, layer.heads, size, generator=generator) for size in (layer.key_size, layer.value_size))
        store(cache, number, pages, offsets, k, v)
        given.append((k, v))
    cache.copy_pages(torch.tensor([3, 1]), torch.tensor([2, 0]))
    for number, pair in enumerate(given):
        for pool, right in zip((cache.keys[number], cache.values[number]), pair, strict=True):
            assert torch.equal(pool[[3, 2, 1, 0], :, [4, 4, 2, 2]], right[[1, 1, 2, 2]])
            assert int((pool != 0).sum()) == int((right[[1, 1, 2, 2]] != 0).sum())


def test_memory_that_is_free_in_several_places_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PagedCache.make(LAYERS, 3, 5, torch.float32, CPU)
    empty = torch.empty

    def small(count: Any, **options: Any) -> torch.Tensor:
        if count > 4 * 5 * 64:
            raise torch.OutOfMemoryError("no such place")
        return empty(count, **options)

    monkeypatch.setattr(cache_module.torch, "empty", small)
    apart = PagedCache.make(LAYERS, 3, 5, torch.float32, CPU)
    assert [one.shape for one in (*apart.keys, *apart.values)] == [one.shape for one in (*whole.keys, *whole.values)]
    assert len({one.untyped_storage().data_ptr() for one in (*apart.keys, *apart.values)}) == 2 * len(LAYERS)
    assert not any(one.any() for one in (*apart.keys, *apart.values, *whole.keys, *whole.values)), "all are cleared"


def test_each_token_of_a_chunk_has_its_place() -> None:
    spans = [(0, 9, (4, 1, 7)), (0, 1, (2,)), (3, 6, (5, 0, 6)), (8, 4, (3, 9, 8))]  # a chunk's pages are the prompt's
    expected = [(at, own[at // 4], at % 4) for start, count, own in spans for at in range(start, start + count)]
    assert list(zip(*(part.tolist() for part in places_of(spans, 4)), strict=True)) == expected
