"""Copies of the weights in the trainer's host memory, from which they are sent to servers while training goes on."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from truestep.gpu.pinned import zeros_on_host
from truestep.publish.packed import Entry

_ALIGNED = 64  # bytes: a view of any type may begin there


@dataclass(frozen=True, eq=False)
class HostWeights:
    """One publication's tensors. Their buffer is used again when nobody refers to this object any more."""

    name: str  # says the version
    tensors: Mapping[str, torch.Tensor]


class HostCopies:
    """Buffers in host memory, each as large as the model in the type that is published.

    Two are used by turns. A third is made where a slow server still takes what is in one of them.
    """

    def __init__(self, device: torch.device):
        """`device`: of the tensors that are copied. A GPU copies into pinned memory by itself."""
        self._device = device
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()  # weights may be let go by the thread that sends them
        self._buffer: torch.Tensor | None = None
        self._places: dict[str, torch.Tensor] = {}

    def begin(self, entries: Sequence[Entry]) -> None:
        """Begin a copy of these tensors."""
        sizes = [-(-entry.nbytes // _ALIGNED) * _ALIGNED for entry in entries]
        if self._buffer is None:  # else what was begun before was never finished
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
        """Copy tensors, on a GPU behind what is queued there."""
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor.detach(), non_blocking=True)

    def finish(self, name: str) -> HostWeights:
        """Wait for the copies, and give them."""
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
