"""An NCCL group of the trainer (rank 0) and all ranks of one server.

vLLM's backend `nccl` receives the group's id by HTTP and joins the group. Then all ranks all-reduce one float32, and
rank 0 broadcasts the weights. torch.distributed uses a different handshake to join groups, so NCCL's functions are
called directly, from the library that torch has loaded.
"""

import base64
import ctypes
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from truestep.weight_transfer.link import LinkError

_BYTE, _FLOAT = 1, 7  # ncclUint8, ncclFloat32
_SUM = 0
_ID_BYTES = 128


class NcclError(LinkError):
    """An NCCL call failed, for instance because another rank of the group has died."""


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
        """Join a group, on the current device. Return when all ranks have joined."""
        group = ctypes.c_void_p()
        self("ncclCommInitRank", ctypes.byref(group), ranks, _Id.from_buffer_copy(identity), rank)
        return group

    def warm_up(self, group: ctypes.c_void_p, stream: torch.cuda.Stream) -> None:
        """All-reduce one number, as all ranks of vLLM's groups do first."""
        with torch.cuda.stream(stream):
            one = torch.zeros(1, device=stream.device)
            place = one.data_ptr()
            self("ncclAllReduce", place, place, 1, _FLOAT, _SUM, group, stream.cuda_stream)
            stream.synchronize()

    def broadcast(self, group: ctypes.c_void_p, content: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a broadcast of bytes from rank 0: from `content` on rank 0, into `content` on other ranks."""
        place = content.data_ptr()
        self("ncclBroadcast", place, place, content.nbytes, _BYTE, 0, group, stream.cuda_stream)


class NcclWire:
    """A `Wire` over NCCL: a group that is joined once and broadcasts on its own stream."""

    def __init__(self, device: torch.device):
        """Make a group's id. No rank has joined yet."""
        self.device = device
        self._nccl = Nccl()
        self._id = self._nccl.new_id()
        self._stream, self._beside = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._group: ctypes.c_void_p | None = None

    def init_info(self, ranks: int, chunk: int) -> dict[str, Any]:
        """Return the `init_info` of vLLM's backend `nccl` for a server with `ranks` ranks."""
        return {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode("ascii"),
            "rank_offset": 1,
            "world_size": ranks + 1,
            "packed": True,
            "packed_buffer_size_bytes": chunk,
            "packed_num_buffers": 2,
        }

    def join(self, ranks: int) -> None:
        """Join the group with `ranks` ranks of the server. This may block for ever, so call it in a thread."""
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
        """Queue the block's GPU work on a side stream, where it runs concurrently with the trainer's other GPU work."""
        return torch.cuda.stream(self._beside)

    def close(self) -> None:
        """Leave the group after all transfers have ended."""
        if self._group is not None:
            group, self._group = self._group, None
            self._nccl("ncclCommDestroy", group)

    def abandon(self) -> None:
        """Leave the group at once: a broadcast that no rank receives would occupy the GPU for ever."""
        if self._group is not None:
            group, self._group = self._group, None
            self._nccl("ncclCommAbort", group)


@dataclass(frozen=True)
class Broadcast:
    done: torch.cuda.Event

    def is_completed(self) -> bool:
        return self.done.query()
