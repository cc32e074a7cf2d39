"""Host memory that a GPU copies from and to by itself, beside what it computes.

torch's own pinned memory comes in powers of two, up to twice what is asked for: 98 GB of masters and moments would take
130. So large tensors lie in memory that is mapped here, as large as they are, and registered with the driver.
"""

import contextlib
import mmap
import weakref
from collections.abc import Sequence

import torch

_LARGE = 2**20  # bytes from which on torch's rounding counts


def zeros_on_host(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Make a tensor of zeros on the host; `pinned`: in memory that a GPU reads and writes by itself."""
    count = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
    if not pinned or count < _LARGE:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=pinned)
    memory = mapped(count)
    # Touched by all of torch's threads, as registering would by one.
    tensor = torch.frombuffer(memory, dtype=torch.uint8).fill_(0)
    address = tensor.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, count, 0)):  # then it is pageable: slower, no worse
        _forget_error()
    else:
        weakref.finalize(memory, _unregister, address).atexit = False
    return tensor.view(dtype).view(tuple(shape))


def mapped(count: int) -> mmap.mmap:
    """Map so many bytes of memory, in large pages where the system has them."""
    memory = mmap.mmap(-1, count)
    with contextlib.suppress(OSError, AttributeError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host, into memory that its GPU can read by itself."""
    return zeros_on_host(tensor.shape, tensor.dtype, pinned=tensor.device.type == "cuda").copy_(tensor)


def _forget_error() -> None:
    """Launch a kernel, which reports the error that a refused registration leaves behind: else the next one would."""
    with contextlib.suppress(RuntimeError):
        torch.full((1,), 1.0, device="cuda")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
