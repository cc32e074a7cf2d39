"""Keeps the inputs of recomputed layers, their only saved activations, in host memory until the backward pass.

A side stream copies a layer's input to the host while the layer computes, and back during the backward pass of the
layer after it. Values do not change. Without a GPU the same code copies within host memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from truestep.gpu.pinned import zeros_on_host


@dataclass(eq=False)
class _Kept:
    """A tensor that is on the host, or being copied there."""

    host: torch.Tensor
    device: torch.device
    before: "_Kept | None"  # the tensor saved before, which the backward pass needs next
    back: torch.Tensor | None = None  # the copy back on the device, once it is requested
    there: Any = None  # the CUDA event after which `back` is valid

    def is_back(self, copy: torch.Tensor, there: Any) -> None:
        self.back, self.there = copy, there


class ActivationOffload:
    """Keeps tensors that autograd saves in host memory. Host buffers are reused."""

    def __init__(self, device: torch.device):
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[tuple[torch.dtype, torch.Size], list[torch.Tensor]] = {}

    @contextmanager
    def keeping(self, width: int) -> Iterator[None]:
        """Offload the hidden states (tensors of this width) that autograd saves within the block."""
        last: list[_Kept | None] = [None]

        def pack(tensor: torch.Tensor) -> Any:
            # Weights have two dimensions. The input of a stage's first layer is a leaf, kept for its gradient anyway.
            moves = tensor.ndim == 3 and tensor.shape[-1] == width and tensor.is_floating_point() and not tensor.is_leaf
            if not moves:
                return tensor
            last[0] = self._send(tensor, last[0])
            return last[0]

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _send(self, tensor: torch.Tensor, before: _Kept | None) -> _Kept:
        rooms = self._free.get((tensor.dtype, tensor.shape))
        pinned = self._stream is not None
        host = rooms.pop() if rooms else zeros_on_host(tensor.shape, tensor.dtype, pinned=pinned)
        kept = tensor.detach()
        if self._stream is None:
            host.copy_(kept)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                host.copy_(kept, non_blocking=True)
            kept.record_stream(self._stream)  # its memory is reused only after the copy
        return _Kept(host, tensor.device, before)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Kept):
            tensor: torch.Tensor = packed
            return tensor
        self._fetch(packed)
        if packed.before is not None:
            self._fetch(packed.before)
        assert packed.back is not None
        if packed.there is not None:
            current = torch.cuda.current_stream(packed.device)
            current.wait_event(packed.there)
            packed.back.record_stream(current)
        return packed.back

    def _fetch(self, kept: _Kept) -> None:
        """Start to copy a tensor back to the device, and free its host buffer for reuse."""
        if kept.back is not None:
            return
        if self._stream is None:
            kept.is_back(kept.host.clone(), None)
        else:
            with torch.cuda.stream(self._stream):
                kept.is_back(kept.host.to(kept.device, non_blocking=True), self._stream.record_event())
        # Safe: the next copy to this buffer is on the same stream, after this copy.
        self._free.setdefault((kept.host.dtype, kept.host.shape), []).append(kept.host)
