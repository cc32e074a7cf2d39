"""What differs between devices: sizes, copies, and the code for attention and draws."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from truestep.generate.engine.attend import attend_rows
from truestep.generate.engine.cache import store
from truestep.generate.engine.draw import Drawn, draw

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """Numbers on their way to the host."""

    tensor: torch.Tensor
    event: Any = None  # None: they are there

    def wait(self) -> np.ndarray:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor.numpy()


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


@dataclass
class Device:
    place: torch.device
    page_size: int
    lag: int  # steps that the host may learn of draws late
    piece_tokens: int  # of prompts that a step computes
    compiles: bool  # layers run compiled
    joins: int  # completions join when so many parts of all slots are free
    prompts_first: int  # steps for which what runs may wait while prompts are computed
    attend: Callable[..., torch.Tensor] = attend_rows
    draw: Callable[..., Drawn] = draw
    store: Callable[..., None] = store
    copy: Callable[[torch.Tensor, torch.Tensor], None] = copy  # between the host's memory and the device's
    graphs: bool = False  # steps are CUDA graphs
    fused: bool = False  # so are those over prompts: one kernel attends within all of them
    # Torch does not know that a kernel may still use memory of the host. So what the last copies read or wrote is kept:
    # a step makes two, and the host has waited for a step before it begins the one `lag` + 1 later.
    kept: deque[torch.Tensor] = field(default_factory=lambda: deque(maxlen=16))

    def ready(self, values: np.ndarray) -> torch.Tensor:
        """Lay numbers where a GPU takes them from when their turn comes, and the host does not wait."""
        host = torch.from_numpy(values)
        return host if self.place.type == "cpu" else host.pin_memory()

    def refill(self, target: torch.Tensor, ready: torch.Tensor) -> None:
        """Copy what is `ready` to the device, to memory that is there."""
        self.copy(target, ready)
        self.kept.append(ready)

    def send(self, values: np.ndarray) -> torch.Tensor:
        """Copy to the device."""
        return self.ready(values).to(self.place, non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> Result:
        if self.place.type == "cpu":
            return Result(tensor)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.copy(host, tensor.contiguous())
        self.kept.append(host)
        event = torch.cuda.Event()
        event.record()
        return Result(host, event)


def device_of(place: torch.device) -> Device:
    if place.type == "cuda":
        return Device(place, page_size=32, lag=2, piece_tokens=4096, compiles=True, joins=12, prompts_first=8)
    return Device(place, page_size=16, lag=0, piece_tokens=4096, compiles=False, joins=64, prompts_first=0)
