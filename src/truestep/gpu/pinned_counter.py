"""A counter in pinned memory that kernels write and the host reads without a synchronisation.

A copy to the host waits for all copies that were queued before, in any stream. While gigabytes of optimizer state or of
a checkpoint are being copied, copying a few bytes would delay a step. A kernel writes them without waiting.
"""

from functools import cache
from typing import Any

import torch


class Window:
    """One number in pinned memory. Kernels write it through `inside`, and the host reads it from `number`."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False), torch.cuda.device(device):  # outside, inference tensors are read-only
            self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self.inside = torch.as_tensor(_Memory(self._host), device=device)  # shares the memory of `_host`
        if self.inside.data_ptr() != self._host.data_ptr():
            raise RuntimeError(f"pinned memory of another GPU than {device}: one process has one GPU")
        self._reads: Any = self._host.numpy()  # also shares the memory of `_host`

    @property
    def number(self) -> int:
        """The number that was written last. Reading it does not synchronise and calls no driver."""
        return int(self._reads[0])


class _Memory:
    """Pinned host memory that torch sees as GPU memory."""

    def __init__(self, tensor: torch.Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<i8",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


_window = cache(Window)


def count_true(flags: torch.Tensor) -> int:
    """Return the number of true flags. On a GPU this synchronises the current stream."""
    if not flags.is_cuda:
        return int(flags.sum())
    window = _window(flags.device)
    torch.sum(flags, 0, keepdim=True, dtype=torch.int64, out=window.inside)
    torch.cuda.current_stream(flags.device).synchronize()
    return window.number
