"""A wire of NCCL: the trainer is rank 0 of a group of its own with the ranks of one server.

vLLM's backend `nccl` joins a group by an id that comes by HTTP. Its ranks add up one float32 when they have joined, and
then take what rank 0 broadcasts. The groups of torch.distributed are joined by other messages, so NCCL is called here
by its own functions, in the library that torch has loaded.
"""

import base64
import ctypes
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from truestep.publish.link import LinkError

_BYTE, _FLOAT = 1, 7  # ncclUint8, ncclFloat32
_SUM = 0
_ID_BYTES = 128


class NcclError(LinkError):
    """NCCL refused a call, as it does when another rank of the group is gone."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class Nccl:
    """NCCL's functions."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnccl.so.2")
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for name, arguments in {
            "ncclGetUniqueId": [ctypes.POINTER(_Id)],
            "ncclCommInitRank": [ctypes.POINTER(pointer), number, _Id, number],
            "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
            "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
            "ncclCommDestroy": [pointer],
            "ncclCommAbort": [pointer],
        }.items():
            getattr(self._library, name).argtypes = arguments
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            said = self._library.ncclGetErrorString(code).decode(errors="replace")
            raise NcclError(f"{name}: {said}")

    def new_id(self) -> bytes:
        found = _Id()
        self("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def join(self, identity: bytes, ranks: int, rank: int) -> ctypes.c_void_p:
        """Enter a group, on the current device; return when all are there."""
        group = ctypes.c_void_p()
        self("ncclCommInitRank", ctypes.byref(group), ranks, _Id.from_buffer_copy(identity), rank)
        return group

    def warm_up(self, group: ctypes.c_void_p, stream: torch.cuda.Stream) -> None:
        """Add up one number, as every rank of a group of vLLM's does first."""
        with torch.cuda.stream(stream):
            one = torch.zeros(1, device=stream.device)
            place = one.data_ptr()
            self("ncclAllReduce", place, place, 1, _FLOAT, _SUM, group, stream.cuda_stream)
            stream.synchronize()

    def broadcast(self, group: ctypes.c_void_p, content: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Send bytes from rank 0, or take them into `content`, as the stream comes to it."""
        place = content.data_ptr()
        self("ncclBroadcast", place, place, content.nbytes, _BYTE, 0, group, stream.cuda_stream)


class NcclWire:
    """A group that is joined once, and broadcasts on a stream of its own."""

    def __init__(self, device: torch.device):
        """Make a group's id. Nobody is in the group yet."""
        self.device = device
        self._nccl = Nccl()
        self._id = self._nccl.new_id()
        self._stream, self._beside = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._group: ctypes.c_void_p | None = None

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
        with torch.cuda.device(self.device):
            self._group = self._nccl.join(self._id, ranks + 1, 0)
            self._nccl.warm_up(self._group, self._stream)

    def send(self, content: torch.Tensor) -> "Broadcast":
        assert self._group is not None, "the group was joined"
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._nccl.broadcast(self._group, content, self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        return Broadcast(done)

    def beside(self) -> AbstractContextManager[Any]:
        """Have what is queued inside run beside the other work of the trainer's device."""
        return torch.cuda.stream(self._beside)

    def close(self) -> None:
        """Leave the group, with all that was sent received."""
        if self._group is not None:
            group, self._group = self._group, None
            self._nccl("ncclCommDestroy", group)

    def abandon(self) -> None:
        """Give up what is being sent: a broadcast that nobody takes would occupy the GPU for ever."""
        if self._group is not None:
            group, self._group = self._group, None
            self._nccl("ncclCommAbort", group)


@dataclass(frozen=True)
class Broadcast:
    done: torch.cuda.Event

    def is_completed(self) -> bool:
        return self.done.query()
