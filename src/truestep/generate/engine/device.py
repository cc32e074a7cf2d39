"""The engine's settings for a CPU or a GPU: sizes, copies, and the functions for attention and draws."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from truestep.generate.engine.attend import attend_rows
from truestep.generate.engine.cache import gather, store
from truestep.generate.engine.draw import Drawn, draw
from truestep.generate.engine.recur import in_torch


@dataclass(frozen=True)
class Result:
    """A tensor that is being copied to the host."""

    tensor: torch.Tensor
    event: Any = None  # recorded after the copy; None: the tensor is complete

    def wait(self) -> np.ndarray:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor.numpy()


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


@dataclass
class Device:
    """Settings and functions of the engine on one device."""

    place: torch.device
    page_size: int  # tokens
    lag: int  # how many steps may be in flight before the host reads their drawn tokens
    chunk_tokens: int  # most prompt tokens of a step
    compiles: bool  # layers run compiled
    joins: int  # prefill starts when 1/joins of the slots is free
    prompts_first: int  # most prefill steps in a row without decoding
    patience: int  # how many decode steps a few prompts wait for more prompts
    attend: Callable[..., torch.Tensor] = attend_rows
    advance: Callable[..., Any] = in_torch  # a decode step of a recurrent operation
    addressed: bool = False  # `advance` finds the states of all operations by their addresses
    draw: Callable[..., Drawn] = draw
    store: Callable[..., None] = store
    gather: Callable[..., tuple[torch.Tensor, torch.Tensor]] = gather
    copy: Callable[[torch.Tensor, torch.Tensor], None] = copy  # between host and device memory
    graphs: bool = False  # decode steps use CUDA graphs
    past: bool = False  # chunks that follow earlier tokens attend by the fused kernel
    fused: bool = False  # prefill steps use CUDA graphs, too: one kernel attends within all prompts
    # Torch does not know that a copy kernel still uses pinned memory. So the tensors of the last copies are kept alive:
    # a step makes two copies, and the host has waited for a step before it begins the one `lag` + 1 later.
    kept: deque[torch.Tensor] = field(default_factory=lambda: deque(maxlen=16))

    def ready(self, values: np.ndarray) -> torch.Tensor:
        """Return the values as a host tensor, pinned for a GPU, so that the host need not wait for its copy."""
        host = torch.from_numpy(values)
        return host if self.place.type == "cpu" else host.pin_memory()

    def refill(self, target: torch.Tensor, ready: torch.Tensor) -> None:
        """Copy a host tensor from `ready` to an existing device tensor."""
        self.copy(target, ready)
        self.kept.append(ready)

    def send(self, values: np.ndarray) -> torch.Tensor:
        """Copy values to a new device tensor, without waiting."""
        return self.ready(values).to(self.place, non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> Result:
        """Start a copy to the host."""
        if self.place.type == "cpu":
            return Result(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if tensor.dtype == torch.int64:
            self.copy(host, tensor.contiguous())
            self.kept.append(host)
        else:
            host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Result(host, event)


def device_of(place: torch.device) -> Device:
    if place.type == "cuda":
        return Device(
            place, page_size=32, lag=2, chunk_tokens=4096, compiles=True, joins=12, prompts_first=8, patience=8
        )
    return Device(place, page_size=16, lag=0, chunk_tokens=4096, compiles=False, joins=64, prompts_first=0, patience=0)
