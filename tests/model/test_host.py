"""Memory of the host: of any size to the byte, and given back when the last tensor in it is gone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from truestep.gpu import pinned as host


class Runtime:
    """A driver that writes down what is registered with it."""

    def __init__(self, answer: int = 0):
        self.answer = answer
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:  # noqa: N802
        if not self.answer:
            self.registered[address] = count
        return self.answer

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16])
def test_large_tensors_are_registered_as_large_as_they_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor = host.zeros_on_host((1030, 2047), dtype, pinned=True)
    assert runtime.registered == {tensor.data_ptr(): 1030 * 2047 * dtype.itemsize}
    assert tensor.dtype == dtype and tensor.shape == (1030, 2047) and not tensor.any()
    row = tensor[3]
    row.fill_(1)
    del tensor
    gc.collect()
    assert runtime.registered and row.sum() == 2047, "a view keeps the memory"
    del row
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_registered_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(answer=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    forgotten: list[bool] = []
    monkeypatch.setattr(host, "_forget_error", lambda: forgotten.append(True))
    tensor = host.zeros_on_host((2**20,), torch.float32, pinned=True)
    assert tensor.add_(1).sum() == 2**20
    assert forgotten == [True]
    del tensor
    gc.collect()


def test_mapped_memory_goes_with_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[Any] = []
    honest = host.mapped

    def watched(count: int) -> Any:
        memory = honest(count)
        weakref.finalize(memory, gone.append, count)
        return memory

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(host, "mapped", watched)
    monkeypatch.setattr(host, "_unregister", lambda address: None)
    tensor = host.zeros_on_host((2**20,), torch.float32, pinned=True)
    assert not gone
    del tensor
    gc.collect()
    assert gone == [2**22]


def test_without_a_gpu_it_is_a_plain_tensor() -> None:
    source = torch.randn(600, 600)
    copy = host.to_host(source)
    assert torch.equal(copy, source) and copy.data_ptr() != source.data_ptr() and not copy.is_pinned()
