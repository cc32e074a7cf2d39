"""Has vLLM's own backend `nccl` send by gloo, so that a vLLM without a GPU runs it: a plugin of a real server.

All else is vLLM's: its messages, ranks, chunks, and how it loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

ID_BYTES = 128  # of NCCL's ids
Group = dist.ProcessGroupGloo


def id_of(folder: str) -> bytes:
    """Give the id of a group whose ranks meet in a folder."""
    return folder.encode().ljust(ID_BYTES, b"\0")


def join(identity: bytes, rank: int, ranks: int) -> Group:
    assert len(identity) == ID_BYTES
    store = dist.FileStore(str(Path(identity.rstrip(b"\0").decode(), "store")), ranks)
    return Group(store, rank, ranks, timedelta(seconds=20))


def broadcast(group: Group, content: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([content], options)


class _Communicator:
    """What vLLM asks of its own communicator."""

    def __init__(self, group: Group):
        self._group = group

    def broadcast(self, content: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0
        broadcast(self._group, content).wait()

    def destroy(self) -> None: ...


class _Stream:
    def synchronize(self) -> None: ...


def _without_device(work: Callable[..., Any]) -> Callable[..., Any]:
    def done(*arguments: Any, **options: Any) -> Any:
        with patch("torch.accelerator.current_device_index", lambda: 0):
            return work(*arguments, **options)

    return done


def register() -> None:
    """vLLM calls this in each of its processes."""
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine, packed_tensor

    def joined(identity: bytes, rank: int, ranks: int, device: int) -> _Communicator:
        return _Communicator(join(identity, rank, ranks))

    nccl_common.uid_init_process_group = joined
    packed_tensor._get_streams = lambda device, count: (_Stream(),) * count
    for name in ("worker_init_process_group", "packed_nccl_broadcast_consumer"):
        setattr(nccl_engine, name, _without_device(getattr(nccl_engine, name)))
