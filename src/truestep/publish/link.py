"""The trainer's side of a link to a server's GPUs: tensors go out in packed chunks, each as soon as it is full."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

import torch

from truestep.errors import TruestepError
from truestep.publish.packed import Entry, as_bytes, chunks_of

CHUNK = 2**28  # bytes; the server needs memory for two chunks too
_UNDER_WAY = 2  # chunks that are being sent while the next one is filled
_BRIEF, _NAP = 0.005, 0.0002  # seconds: of looking without a rest, and of each rest after them


class LinkError(TruestepError):
    """A link that does not carry tensors, and why."""


class Sending(Protocol):
    """Bytes on their way."""

    def is_completed(self) -> bool:
        """Say whether the memory that they come from is free again. What went wrong on the way is raised."""
        ...


class Wire(Protocol):
    """Carries bytes to every rank of a server, in the order in which they are sent."""

    device: torch.device

    def join(self, ranks: int) -> None:
        """Wait for so many ranks of the server, which may be for ever."""
        ...

    def send(self, content: torch.Tensor) -> Sending:
        """Begin to send an array of uint8. What is queued on its device before this call is done first."""
        ...


def join(wire: Wire, ranks: int, answer: "Future[Any]", patience: float) -> None:
    """Join with a server that was asked to join too. What it answers instead is raised; one that does neither in
    `patience` seconds is an error."""
    joined: Future[None] = Future()

    def enter() -> None:
        try:
            wire.join(ranks)
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(None)

    threading.Thread(target=enter, name="join servers", daemon=True).start()  # nothing ends it when nobody comes
    deadline = time.monotonic() + patience
    waiting: set[Future[Any]] = {joined, answer}
    while waiting:
        done, waiting = wait(waiting, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
        if not done:
            raise LinkError(f"the ranks of the server did not join in {patience:g} s")
        for one in done:
            one.result()


class Sender:
    """Sends tensors that were announced, in that order. It holds three chunks, and never the whole."""

    def __init__(self, wire: Wire, size: int = CHUNK, patience: float = 60.0, watch: Callable[[], None] | None = None):
        """Send by `wire` in chunks of `size` bytes. A chunk that takes more than `patience` seconds is an error, and so
        is what `watch` raises: it is called while a chunk is waited for."""
        self._wire, self._size, self._patience = wire, size, patience
        self._watch = watch or (lambda: None)
        self._chunks: deque[list[Entry]] = deque()
        self._filling: _Chunk | None = None
        self._under_way: deque[tuple[Sending, torch.Tensor]] = deque()  # the memory stays until it is read

    def begin(self, entries: Iterable[Entry]) -> None:
        """Announce all tensors."""
        assert not self._under_way and self._filling is None, "the one before has ended"
        self._chunks = deque(chunks_of(entries, self._size))

    @torch.no_grad()
    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send tensors that are next."""
        for name, tensor in tensors.items():
            if self._filling is None:
                self._filling = self._next(name)
            if (filled := self._filling.add(name, tensor, self._wire.device)) is not None:
                self._filling = None
                if len(filled):
                    self._under_way.append((self._wire.send(filled), filled))

    def finish(self) -> None:
        """Wait until all is sent."""
        if self._chunks or self._filling is not None:
            raise LinkError("tensors that were announced were not given")
        self._wait_for(0)

    def _next(self, name: str) -> "_Chunk":
        if not self._chunks:
            raise LinkError(f"{name} was not announced")
        self._wait_for(_UNDER_WAY)
        return _Chunk(self._chunks.popleft())

    def _wait_for(self, most: int) -> None:
        """Wait until no more than so many chunks are under way."""
        while len(self._under_way) > most:
            began = time.monotonic()
            while not self._under_way[0][0].is_completed():
                self._watch()
                waited = time.monotonic() - began
                if waited > self._patience:
                    raise LinkError(f"a chunk of weights was not taken in {self._patience:g} s")
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
        """Take the next tensor; give the chunk when it is full."""
        entry = self._coming.popleft()
        if entry != (name, tensor.dtype, tuple(tensor.shape)):
            raise LinkError(f"{name} of {tensor.dtype} and {list(tensor.shape)} came where {entry} was announced")
        if self._alone:
            return as_bytes(tensor.to(device).contiguous())
        if self._room is None:
            self._room = torch.empty(self._size, dtype=torch.uint8, device=device)
        if entry.nbytes:
            place = self._room[self._end : self._end + entry.nbytes]
            # Bytes of a chunk may begin anywhere: a view of the tensor's type may not.
            place.copy_(as_bytes(tensor.contiguous()), non_blocking=True)
            self._end += entry.nbytes
        return None if self._coming else self._room
