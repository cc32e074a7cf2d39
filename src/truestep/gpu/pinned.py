"""Pinned host memory, for copies that run concurrently with the GPU's computation.

torch's pinned allocator rounds sizes up to powers of two: 98 GB of masters and moments would take 130 GB. So large
tensors use memory of their exact size, which is mapped here and registered with the driver.
"""

import contextlib
import mmap
import weakref
from collections.abc import Sequence

import torch

_LARGE = 2**20  # bytes; smaller tensors use torch's allocator


def zeros_on_host(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Make a tensor of zeros in host memory, pinned or not."""
    count = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
    if not pinned or count < _LARGE:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=pinned)
    return _zeros_in(mapped(count), pinned=True).view(dtype).view(tuple(shape))


def zeros_of_file(handle: int, count: int, *, pinned: bool) -> torch.Tensor:
    """Make a tensor of zero bytes in an in-memory file, which other processes can open too."""
    return _zeros_in(mmap.mmap(handle, count), pinned=pinned)


def _zeros_in(memory: mmap.mmap, *, pinned: bool) -> torch.Tensor:
    # Here all of torch's threads fault the pages in. The registration would do so with one thread.
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(0)
    address = tensor.data_ptr()
    if not pinned:
        return tensor
    if int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)):  # pageable memory works, too, but is slower
        _forget_error()
    else:
        weakref.finalize(memory, _unregister, address).atexit = False
    return tensor


def mapped(count: int) -> mmap.mmap:
    """Map `count` bytes of memory, in huge pages where the system has them."""
    memory = mmap.mmap(-1, count)
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host, to pinned memory if it is on a GPU."""
    return zeros_on_host(tensor.shape, tensor.dtype, pinned=tensor.device.type == "cuda").copy_(tensor)


def _forget_error() -> None:
    """Launch a kernel to clear CUDA's last error after a failed registration; otherwise the next kernel would raise
    it."""
    with contextlib.suppress(RuntimeError):
        torch.full((1,), 1.0, device="cuda")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
