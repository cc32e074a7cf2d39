"""A server that speaks as the backend `nccl` of vLLM does, with gloo in the place of NCCL, and the trainer's side."""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch

from server.fake_vllm import FakeVllm
from server.gloo_in_vllm import broadcast, id_of, join
from truestep.generate.servers.nccl_link import Link
from truestep.generate.servers.vllm import Vllm
from truestep.weight_transfer.link import Sending

CHUNK = 5000  # bytes: many for a tiny model
PATIENCE = 8.0  # seconds
BY_LINK = {"transfer": "nccl", "protocol": "server.linked_server:VllmByGloo"}  # of a sampler


def read(info: dict[str, Any], size: int, receive: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read tensors by a plain loop, as a server does that knows the announcement and the size of a chunk."""
    found, waiting, total = dict[str, torch.Tensor](), list[tuple[str, torch.dtype, list[int], int]](), 0

    def take() -> None:
        content, begin = receive(total), 0
        for name, dtype, shape, length in waiting:
            found[name] = content[begin : begin + length].clone().view(dtype).view(shape)
            begin += length

    for name, dtype_name, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
        dtype = getattr(torch, dtype_name)
        length = torch.empty(shape, dtype=dtype, device="meta").nbytes
        waiting.append((name, dtype, shape, length))
        total += length
        if total > size:
            take()
            waiting, total = [], 0
    if total:
        take()
    for name, dtype, shape, _ in waiting:
        found.setdefault(name, torch.empty(shape, dtype=dtype))
    return found


class GlooWire:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._id, self._group = id_of(tempfile.mkdtemp()), None

    def init_info(self, ranks: int, chunk: int) -> dict[str, Any]:
        size = {"packed": True, "packed_buffer_size_bytes": chunk}
        identity = base64.b64encode(self._id).decode()
        return {"nccl_unique_id_b64": identity, "rank_offset": 1, "world_size": ranks + 1, **size}

    def join(self, ranks: int) -> None:
        self._group = join(self._id, 0, ranks + 1)

    def send(self, content: torch.Tensor) -> Sending:
        sending: Sending = broadcast(self._group, content)
        return sending

    def beside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def abandon(self) -> None:
        self._group = None


class VllmByGloo(Vllm):
    def _make_link(self, device: torch.device) -> Link:
        return Link(GlooWire(), PATIENCE, CHUNK)


class FakeLinked(FakeVllm):
    def __init__(self, model: Path, name: str):
        super().__init__(model, name)
        self._group: Any = None
        self._chunk = 0
        self.refuses = False  # it was started with another backend
        self.before_chunk: Callable[[int], None] | None = None  # is called with the number of each
        self.before_start: Callable[[], None] | None = None  # of an update
        self._empty = self._dead = False  # its layers, since an update began; its engine

    def restart(self) -> None:
        super().restart()
        self._group, self._empty, self._dead = None, False, False

    async def _reply(self, path: str, body: Any) -> Any:
        if path == "/start_weight_update" and self.before_start is not None:
            self.before_start()
        if self._dead or (self._empty and path == "/v1/completions"):
            self._dead = True
            raise RuntimeError("EngineCore encountered an issue: operators with Meta tensors")
        answer = await self._linked(path, body)
        if path in ("/start_weight_update", "/finish_weight_update"):
            self._empty = path == "/start_weight_update"
        return answer

    async def _linked(self, path: str, body: Any) -> Any:
        info = (body or {}).get("init_info") or (body or {}).get("update_info")
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            if self.refuses:
                raise RuntimeError("got an unexpected keyword argument 'nccl_unique_id_b64'")
            self._chunk = info["packed_buffer_size_bytes"]
            identity = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
            self._group = await asyncio.to_thread(join, identity, 1, info["world_size"])
            return {"message": "done"}
        if path == "/update_weights":
            if not self.updating:
                raise RuntimeError("start_weight_update must be called before update_weights.")
            try:
                if self.before_update is not None:
                    self.before_update(info)
                if self._group is None:
                    raise RuntimeError("NCCL weight transfer not initialized.")
                tensors = await asyncio.to_thread(self._receive, self._group, info)
            except BaseException:
                self.updating = False
                raise
            if self.takes != "nothing":
                self._load_tensors(iter(tensors.items()))
            return {"message": "done"}
        return await super()._reply(path, body)

    def _receive(self, group: Any, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        numbers = count()

        def receive(size: int) -> torch.Tensor:
            if self.before_chunk is not None:
                self.before_chunk(next(numbers))
            content = torch.empty(size, dtype=torch.uint8)
            broadcast(group, content).wait()
            return content

        return read(info, self._chunk, receive)
