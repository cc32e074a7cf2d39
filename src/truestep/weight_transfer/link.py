"""Sends tensors to a server's GPUs in packed chunks, each as soon as it is full, with a time limit."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

import torch

from truestep.errors import TruestepError
from truestep.weight_transfer.packed import Entry, as_bytes, chunks_of

CHUNK = 2**28  # bytes; the server needs memory for two chunks too
_UNDER_WAY = 2  # chunks that may be in flight while the next one is filled
_BRIEF, _NAP = 0.005, 0.0002  # seconds of polling without sleep, and seconds of each sleep after that


class LinkError(TruestepError):
    """Tensors cannot be sent; the message says why."""


class Sending(Protocol):
    """A transfer in flight."""

    def is_completed(self) -> bool:
        """Tell whether the transfer is complete, so that its memory may be reused. Raise an error if it failed."""
        ...


class Wire(Protocol):
    """A connection to all ranks of a server. It keeps the order of transfers."""

    device: torch.device

    def join(self, ranks: int) -> None:
        """Join a group with `ranks` ranks of the server. This may block for ever."""
        ...

    def send(self, content: torch.Tensor) -> Sending:
        """Start to send an array of uint8, after the work that is queued on its device."""
        ...


def join(wire: Wire, ranks: int, answer: "Future[Any]", patience: float) -> None:
    """Join a group with a server. `answer` is the server's answer to the request to join; its error is raised. Raise
    `LinkError` after `patience` seconds."""
    joined: Future[None] = Future()

    def enter() -> None:
        try:
            wire.join(ranks)
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(None)

    threading.Thread(target=enter, name="join servers", daemon=True).start()  # the call may block for ever
    deadline = time.monotonic() + patience
    waiting: set[Future[Any]] = {joined, answer}
    while waiting:
        done, waiting = wait(waiting, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if not done:
            raise LinkError(f"the ranks of the server did not join in {patience:g} s")
        for one in done:
            one.result()


class Sender:
    """Sends announced tensors in order. It holds at most three chunks."""

    def __init__(self, wire: Wire, size: int = CHUNK, patience: float = 60.0, watch: Callable[[], None] | None = None):
        """Send by `wire` in chunks of `size` bytes. Each chunk must be sent within `patience` seconds. `watch` is
        called while the sender waits for a chunk; if it raises, the transfer ends."""
        self._wire, self._size, self._patience = wire, size, patience
        self._watch = watch or (lambda: None)
        self._chunks: deque[list[Entry]] = deque()
        self._filling: _Chunk | None = None
        self._under_way: deque[tuple[Sending, torch.Tensor]] = deque()  # keeps the memory alive until it is sent

    def begin(self, entries: Iterable[Entry]) -> None:
        """Announce all tensors."""
        assert not self._under_way and self._filling is None, "the previous transfer has ended"
        self._chunks = deque(chunks_of(entries, self._size))

    @torch.no_grad()
    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the next tensors, in the order announced with `begin`."""
        for name, tensor in tensors.items():
            if self._filling is None:
                self._filling = self._next(name)
            if (filled := self._filling.add(name, tensor, self._wire.device)) is not None:
                self._filling = None
                if len(filled):
                    self._under_way.append((self._wire.send(filled), filled))

    def finish(self) -> None:
        """Wait until all tensors are sent."""
        if self._chunks or self._filling is not None:
            raise LinkError("some announced tensors were not sent")
        self._wait_for(0)

    def _next(self, name: str) -> "_Chunk":
        if not self._chunks:
            raise LinkError(f"{name} was not announced")
        self._wait_for(_UNDER_WAY)
        return _Chunk(self._chunks.popleft())

    def _wait_for(self, most: int) -> None:
        """Wait until at most `most` chunks are in flight."""
        while len(self._under_way) > most:
            began = time.monotonic()
            while not self._under_way[0][0].is_completed():
                self._watch()
                waited = time.monotonic() - began
                if waited > self._patience:
                    raise LinkError(f"the server did not receive a chunk of weights within {self._patience:g} s")
                if waited > _BRIEF:
                    time.sleep(_NAP)
            self._under_way.popleft()


class _Chunk:
    """A chunk that is being filled."""

    def __init__(self, entries: list[Entry]):
        self._coming = deque(entries)
        self._alone = len(entries) == 1
        self._size = sum(entry.nbytes for entry in entries)
        self._room: torch.Tensor | None = None
        self._end = 0

    def add(self, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """Add the next tensor. Return the chunk if it is full, else None."""
        entry = self._coming.popleft()
        if entry != (name, tensor.dtype, tuple(tensor.shape)):
            raise LinkError(f"{name} of {tensor.dtype} and {list(tensor.shape)} came where {entry} was announced")
        if self._alone:
            return as_bytes(tensor.to(device).contiguous())
        if self._room is None:
            self._room = torch.empty(self._size, dtype=torch.uint8, device=device)
        if entry.nbytes:
            place = self._room[self._end : self._end + entry.nbytes]
            # As bytes: the position in the chunk may be unaligned for the tensor's dtype.
            place.copy_(as_bytes(tensor.contiguous()), non_blocking=True)
            self._end += entry.nbytes
        return None if self._coming else self._room
