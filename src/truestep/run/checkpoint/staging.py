"""Copies weights and optimizer state to a staging buffer in host memory, before the next update changes them. The
buffer has the layout of the checkpoint's file, header included, so that it is written to the disk as it is.

The thread that writes the checkpoint copies while the next step computes. A GPU completes all queued copies of one
stream to the host before those of other streams, and a step waits for small copies of its own. So the thread queues one
piece at a time and waits for it. It checks the source tensors, on their device, for values that are not finite.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from truestep.errors import TruestepError
from truestep.files.tensors import Layout, lay_out
from truestep.gpu.pinned import mapped, zeros_of_file, zeros_on_host
from truestep.process import progress
from truestep.ranks.keeper import new_memory
from truestep.run.checkpoint.background import Task
from truestep.weights.finite import Extremes
from truestep.weights.tensor_parts import BUFFER, TensorPart

_PIECE = 2**24  # bytes queued at a time: a GPU copies them in a third of a millisecond


class CopyError(TruestepError):
    pass


class Staged:
    """The parts of one save. After `copy`, their values are in the staging buffer, in the layout of their file."""

    def __init__(self, given: Sequence[TensorPart], staging: "Staging"):
        self.parts: Sequence[TensorPart] = given
        self.image = torch.empty(0, dtype=torch.uint8)  # the bytes of the file
        self._staging = staging
        self._sources = [part.values.detach() for part in given]
        device = _device_of(given)
        self._stream: Any = None if device is None else staging.stream(device)
        # An event after the last kernel that changes the sources.
        self._ready: Any = None if device is None else torch.cuda.current_stream(device).record_event()
        self._copied = threading.Event()
        self._given_up = False
        self._extremes = Extremes()
        self.not_finite: list[str] = []  # the keys of weights and states with values that are not finite

    @torch.no_grad()
    def copy(self) -> None:
        """Make the layout of the buffer, and copy all parts. Return when the copies are complete. This runs in a
        thread, so that no step waits for it."""
        try:
            self.image, self.parts = self._staging.room_for(self.parts)
            self._copy_on_gpu() if self._stream is not None else self._copy_here()
        finally:
            self._sources = []
            self._copied.set()

    def _copy_here(self) -> None:
        for source, target in self._pieces():
            target.copy_(source)
        self.not_finite = self._extremes.not_finite()

    def _copy_on_gpu(self) -> None:
        stream, asked = self._stream, 0
        with torch.cuda.stream(stream):  # this also sets the device
            stream.wait_event(self._ready)
            for source, target in self._pieces():
                target.copy_(source, non_blocking=source.is_cuda)
                asked += target.nbytes
                if asked >= _PIECE:
                    stream.synchronize()
                    asked = 0
            stream.synchronize()
            self.not_finite = self._extremes.not_finite()

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for source, part in zip(self._sources, self.parts, strict=True):
            if source.nbytes <= _PIECE or not source.is_contiguous():
                pieces = [(source, part.values)]
            else:
                size = _PIECE // source.itemsize
                pieces = list(zip(source.view(-1).split(size), part.values.view(-1).split(size), strict=True))
            for piece in pieces:
                if self._given_up:
                    raise CopyError("the run ended before its checkpoint was copied")
                if not part.key.startswith(BUFFER):  # a model's buffers may hold infinities
                    self._extremes.add(part.key, piece[0])
                yield piece
            progress.made("bytes staged", source.nbytes)

    def give_up(self) -> None:
        """Stop copying, and wait until `copy` has returned."""
        self._given_up = True
        self._copied.wait()

    def before_update(self) -> None:
        """Wait until all parts are copied."""
        if not self._copied.is_set():
            with progress.waiting_for("the copy of a checkpoint to the host's memory"):
                self._copied.wait()


class Staging:
    """The staging buffer: one block of host memory, reused by the next save."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._making: Task | None = None
        self._stream: Any = None

    @property
    def has_room(self) -> bool:
        """True if the buffer exists, or a thread is allocating it."""
        return self._making is not None or self._room.nbytes > 0

    def make_room_beside(self, parts: Sequence[TensorPart]) -> None:
        """Allocate the buffer for such parts in a thread."""
        size, device = _layout(parts).size, _device_of(parts)
        self._making = Task(lambda: self._make_room(size, device))

    def close(self) -> None:
        """Wait for the thread that allocates the buffer; ignore its error."""
        making = self._making  # read once: another thread may set it to None
        if making is not None:
            making.wait()

    def stage(self, parts: Iterable[TensorPart]) -> Staged:
        """Return the parts as `Staged`, ready to be copied."""
        return Staged(list(parts), self)

    def stream(self, device: torch.device) -> Any:
        """Return the CUDA stream for copies from a GPU."""
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream

    def room_for(self, parts: Sequence[TensorPart]) -> tuple[torch.Tensor, Sequence[TensorPart]]:
        """Return a buffer for these parts, with the file's header written, and the parts with views of the buffer as
        values. The values are not copied yet."""
        layout = _layout(parts)
        self._wait_for_room()
        self._make_room(layout.size, _device_of(parts))
        image, copies = self._room[: layout.size], []
        image[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        for part in parts:
            start = layout.starts[part.key]
            copy = image[start : start + part.values.nbytes].view(part.values.dtype).view(part.values.shape)
            copies.append(replace(part, values=copy))
        return image, copies

    def _wait_for_room(self) -> None:
        making = self._making
        if making is None:
            return
        with progress.waiting_for("host memory for a checkpoint"):
            making.wait()
        self._making = None
        if making.error is not None:
            raise making.error

    def completed(self) -> None:
        """Called when the save that was staged last is complete."""

    def _make_room(self, size: int, device: torch.device | None) -> None:
        pinned = device is not None
        if self._room.nbytes >= size and self._pinned >= pinned:
            return
        self._room, self._pinned = torch.empty(0, dtype=torch.uint8), False  # free the old buffer first
        if device is None:  # write to every page, so that the kernel maps the pages now and not during a copy
            room = torch.frombuffer(mapped(size), dtype=torch.uint8).fill_(0)
        else:
            with torch.cuda.device(device):  # a new thread's current device is cuda:0
                room = zeros_on_host((size,), torch.uint8, pinned=True)
        self._room, self._pinned = room, pinned


class SharedStaging(Staging):
    """Two staging buffers that other processes can hold. They are used in turn: while parts are copied to one, the
    other has the last complete state."""

    def __init__(self) -> None:
        super().__init__()
        self._other = torch.empty(0, dtype=torch.uint8), -1
        self.handle = -1  # of the buffer that is copied to

    def completed(self) -> None:
        self._other, (self._room, self.handle) = (self._room, self.handle), self._other

    def _make_room(self, size: int, device: torch.device | None) -> None:
        if self._room.nbytes == size:
            return
        self._free()
        self.handle = new_memory(size)
        with nullcontext() if device is None else torch.cuda.device(device):
            self._room = zeros_of_file(self.handle, size, pinned=device is not None)

    def _free(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


def _layout(parts: Iterable[TensorPart]) -> Layout:
    return lay_out({part.key: part.values for part in parts})


def _device_of(parts: Iterable[TensorPart]) -> torch.device | None:
    """Return the GPU that holds parts; None if none does."""
    return next((part.values.device for part in parts if part.values.is_cuda), None)
