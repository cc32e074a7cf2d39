"""A wire of NCCL: the trainer is rank 0 of a group of its own with the ranks of one server.

vLLM's backend `nccl` joins a group by an id that comes by HTTP. Its ranks add up one float32 when they have joined, and
then take what rank 0 broadcasts.
"""

import base64
import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import nccl

_MOST = 2**31 - 1  # elements of a message
_WIDE = (torch.uint8, torch.int32, torch.int64)  # NCCL broadcasts bytes, whatever they are called


class NcclWire:
    """A group that is joined once, and broadcasts on a stream of its own."""

    def __init__(self, device: torch.device):
        """Make a group's id. Nobody is in the group yet."""
        self.device = device
        self._id: bytes = nccl.unique_id()
        self._stream = torch.cuda.Stream(device)
        self._group: Any = None

    def init_info(self, ranks: int, chunk: int) -> dict[str, Any]:
        """Invite a server that has so many ranks, as vLLM's backend `nccl` reads it."""
        return {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode("ascii"),
            "rank_offset": 1,
            "world_size": ranks + 1,
            "packed": True,
            "packed_buffer_size_bytes": chunk,
            "packed_num_buffers": 2,
        }

    def join(self, ranks: int) -> None:
        """Enter the group, and wait for as many ranks of the server: this may be for ever, and belongs in a thread."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._group = nccl.init_rank(ranks + 1, self._id, 0)
            nccl.all_reduce([torch.zeros(1, device=self.device)], streams=[self._stream], comms=[self._group])
            self._stream.synchronize()

    def send(self, content: torch.Tensor) -> "Broadcast":
        assert self._group is not None, "the group was joined"
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        widened = _widened(content)
        with torch.cuda.device(self.device):
            nccl.broadcast([widened], 0, streams=[self._stream], comms=[self._group])
            done = torch.cuda.Event()
            done.record(self._stream)
        return Broadcast(done)

    def close(self) -> None:
        """Leave the group, with all that was sent received."""
        self._group = None

    def abandon(self) -> None:
        """Give up what is being sent: a broadcast that nobody takes would occupy the GPU for ever."""
        group, self._group = self._group, None
        if group is not None:
            _abort(group)


@dataclass(frozen=True)
class Broadcast:
    done: torch.cuda.Event

    def is_completed(self) -> bool:
        return self.done.query()


def _widened(content: torch.Tensor) -> torch.Tensor:
    """View bytes as fewer elements where a message would have too many."""
    for dtype in _WIDE:
        if len(content) % dtype.itemsize == 0 and len(content) // dtype.itemsize <= _MOST:
            return content.view(dtype)
    raise ValueError(f"NCCL takes no message of {len(content)} bytes")


def _abort(group: Any) -> None:
    """Abort a group by NCCL's own call, which torch gives for groups of torch.distributed alone."""
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_GetName.restype = ctypes.c_char_p
    python.PyCapsule_GetName.argtypes = [ctypes.py_object]
    python.PyCapsule_SetDestructor.argtypes = [ctypes.py_object, ctypes.c_void_p]
    address = python.PyCapsule_GetPointer(group, python.PyCapsule_GetName(group))
    python.PyCapsule_SetDestructor(group, None)  # what is aborted must not be destroyed again
    library = ctypes.CDLL("libnccl.so.2")  # which torch has loaded
    library.ncclCommAbort.argtypes = [ctypes.c_void_p]
    library.ncclCommAbort(address)
