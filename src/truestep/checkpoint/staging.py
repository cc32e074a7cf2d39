"""Parts are copied to host memory within a step, so that the next step may change what they were copied from."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from truestep import progress
from truestep.checkpoint.background import Task
from truestep.policy.tensor_parts import TensorPart
from truestep.policy.weights.host import zeros_on_host

_ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Staged:
    """Parts whose values are in host memory, as soon as the copies that were begun are done."""

    parts: tuple[TensorPart, ...]
    copied: Any = None  # the event of a GPU after which all copies are there

    def wait(self) -> None:
        """Wait for the copies."""
        if self.copied is not None:
            with progress.waiting_for("the GPU to copy a checkpoint to the host"):
                self.copied.synchronize()

    def before_update(self) -> None:
        """Have the GPU finish the copies before it changes what is copied. Nothing on the host waits for it."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


class Staging:
    """The memory that parts are copied to: one piece, as large as the parts, and used again by the next save."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._making: Task | None = None
        self._stream: Any = None

    @property
    def has_room(self) -> bool:
        """Tell whether there is memory, or a thread that makes it."""
        return self._making is not None or self._room.nbytes > 0

    def make_room_beside(self, parts: Sequence[TensorPart]) -> None:
        """Have a thread make the memory for such parts."""
        size, device = _room_for(parts), _device_of(parts)
        self._making = Task(lambda: self._make_room(size, device))

    def stage(self, parts: Iterable[TensorPart]) -> Staged:
        """Begin to copy parts. Those of a GPU are copied beside what it computes next."""
        given = list(parts)
        device = _device_of(given)
        self._wait_for_room()
        self._make_room(_room_for(given), device)
        if device is not None:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        staged, end = [], 0
        with nullcontext() if device is None else torch.cuda.stream(self._stream):
            for part in given:
                start, end = end, end + _room_of(part.values)
                copy = self._room[start : start + part.values.nbytes].view(part.values.dtype).view(part.values.shape)
                copy.copy_(part.values, non_blocking=part.values.is_cuda)
                progress.made("bytes staged", part.values.nbytes)
                staged.append(replace(part, values=copy))
        return Staged(tuple(staged), None if device is None else self._stream.record_event())

    def _wait_for_room(self) -> None:
        making, self._making = self._making, None
        if making is None:
            return
        with progress.waiting_for("host memory for a checkpoint"):
            making.wait()
        if making.error is not None:
            raise making.error

    def _make_room(self, size: int, device: torch.device | None) -> None:
        pinned = device is not None
        if self._room.nbytes >= size and self._pinned >= pinned:
            return
        self._room, self._pinned = torch.empty(0, dtype=torch.uint8), False  # before there is more
        with nullcontext() if device is None else torch.cuda.device(device):  # that of a new thread is the first
            room = zeros_on_host((size,), torch.uint8, pinned=pinned)
        if not pinned:
            room.fill_(0)  # memory that was never written is not there yet
        self._room, self._pinned = room, pinned


def _device_of(parts: Iterable[TensorPart]) -> torch.device | None:
    """Give the GPU that holds parts, if one does."""
    return next((part.values.device for part in parts if part.values.is_cuda), None)


def _room_for(parts: Iterable[TensorPart]) -> int:
    return sum(_room_of(part.values) for part in parts)


def _room_of(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
