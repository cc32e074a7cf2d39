"""Copies of the weights in host memory, from which they are sent to servers while training goes on."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from truestep.gpu.pinned import zeros_on_host
from truestep.weight_transfer.packed import Entry

_ALIGNED = 64  # bytes: alignment of each tensor, enough for a view of any dtype


@dataclass(frozen=True, eq=False)
class HostWeights:
    """The tensors of one publication. Their buffer is reused once this object is garbage-collected."""

    name: str  # contains the version
    tensors: Mapping[str, torch.Tensor]


class HostCopies:
    """Buffers in host memory, each as large as the model in the published dtype.

    Two are used in turn. A third is allocated if a slow server still reads one of them.
    """

    def __init__(self, device: torch.device):
        """`device` holds the tensors to copy. If it is a GPU, buffers are pinned: copies are asynchronous."""
        self._device = device
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()  # the thread that sends weights may give a buffer back
        self._buffer: torch.Tensor | None = None
        self._places: dict[str, torch.Tensor] = {}

    def begin(self, entries: Sequence[Entry]) -> None:
        """Begin a copy of these tensors."""
        sizes = [-(-entry.nbytes // _ALIGNED) * _ALIGNED for entry in entries]
        if self._buffer is None:  # otherwise the last copy was never finished; its buffer is used
            self._buffer = self._take(sum(sizes))
        self._places, begin = {}, 0
        for entry, size in zip(entries, sizes, strict=True):
            content = self._buffer[begin : begin + entry.nbytes]
            self._places[entry.name] = content.view(entry.dtype).view(entry.shape)
            begin += size

    def _take(self, size: int) -> torch.Tensor:
        with self._lock:
            if self._free:
                return self._free.pop()
        return zeros_on_host((size,), torch.uint8, pinned=self._device.type == "cuda")

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors; on a GPU the copies are queued on the current stream."""
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor.detach(), non_blocking=True)

    def finish(self, name: str) -> HostWeights:
        """Wait for the copies, and return them."""
        assert self._buffer is not None
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        weights, buffer = HostWeights(name, self._places), self._buffer
        weakref.finalize(weights, self._give_back, buffer).atexit = False
        self._buffer, self._places = None, {}
        return weights

    def _give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)
