"""Memory of the host that a GPU's kernels write to.

A copy to the host waits for all others that a GPU was asked for before, whichever stream asks for them; and what comes
behind it in its own stream waits for it. While gigabytes of states or of a checkpoint are on their way, a few bytes
that were copied would hold up a step. A kernel writes them past those copies.
"""

from functools import cache
from typing import Any

import torch


class Window:
    """One number, to be written on the device and read on the host."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False), torch.cuda.device(device):  # or it could not be written outside
            self._host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
            self.inside = torch.as_tensor(_Memory(self._host), device=device)  # the same memory
        if self.inside.data_ptr() != self._host.data_ptr():
            raise RuntimeError(f"pinned memory of another GPU than {device}: one process has one GPU")
        self._reads: Any = self._host.numpy()  # and the same again

    @property
    def number(self) -> int:
        """Read what was written last. This waits for nothing, and calls no driver."""
        return int(self._reads[0])


class _Memory:
    """Pinned memory, described as a GPU's."""

    def __init__(self, tensor: torch.Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<i8",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


_window = cache(Window)


def count_true(flags: torch.Tensor) -> int:
    """Count what is true. The host waits for it."""
    if not flags.is_cuda:
        return int(flags.sum())
    window = _window(flags.device)
    torch.sum(flags, 0, keepdim=True, dtype=torch.int64, out=window.inside)
    torch.cuda.current_stream(flags.device).synchronize()
    return window.number
