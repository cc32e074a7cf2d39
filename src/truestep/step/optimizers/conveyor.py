"""Moves tensors between host and device beside the computation: while one load is worked on, the next is on its way,
and the one before goes back.

On a CPU host and device are one. A load is copied there and back all the same, so that the code that moves it is the
same code, and gives the same numbers bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
# What is moved, and the work on its copies on the device, which changes them in place.
Load = tuple[Sequence[Tensors], Callable[[Sequence[Tensors]], None]]


class Conveyor:
    def __init__(self, device: torch.device):
        self._device = device
        # Each direction has a stream of its own: a GPU has an engine of copies for each.
        self._coming: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._going: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host, into memory that a GPU can read by itself."""
        pinned = self._device.type == "cuda"
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)

    def run(self, loads: Iterable[Load]) -> None:
        """Do the work of each load, in order, on copies on the device, and put them back."""
        if self._coming is not None:
            # What others did to the tensors on the device comes before what is done here.
            self._coming.wait_stream(torch.cuda.current_stream(self._device))
        waiting: tuple[Load, list[Tensors], Any] | None = None
        gone: list[tuple[Any, list[Tensors]]] = []  # copies that are on their way back, kept until they are there
        for load in loads:
            fetched = self._fetch(load[0])
            if waiting is not None:
                gone.append(self._work(*waiting))
                self._forget(gone, 1)
            waiting = load, *fetched
        if waiting is not None:
            gone.append(self._work(*waiting))
        self._forget(gone, 0)

    def settle(self) -> None:
        """Wait until everything is back on the host."""
        if self._going is not None:
            self._going.synchronize()

    def _fetch(self, load: Sequence[Tensors]) -> tuple[list[Tensors], Any]:
        """Begin to copy a load to the device. Give its copies, and the event after which they are there."""
        if self._coming is None:
            return [{kind: value.clone() for kind, value in tensors.items()} for tensors in load], None
        with torch.cuda.stream(self._coming):
            copies = [
                {kind: value.to(self._device, non_blocking=True) for kind, value in tensors.items()} for tensors in load
            ]
        return copies, self._coming.record_event()

    def _work(self, load: Load, fetched: list[Tensors], there: Any) -> tuple[Any, list[Tensors]]:
        """Work on what was fetched, and send it back. Give the event after which it is on the host."""
        host, work = load
        if there is not None:
            torch.cuda.current_stream(self._device).wait_event(there)
        work(fetched)
        if self._going is None:
            _copy_back(host, fetched)
            return None, fetched
        self._going.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._going):
            _copy_back(host, fetched)
        return self._going.record_event(), fetched

    def _forget(self, gone: list[tuple[Any, list[Tensors]]], most: int) -> None:
        """Free all but the last copies: their memory is used again by what comes, after they are back."""
        while len(gone) > most:
            event, _ = gone.pop(0)
            if event is not None:
                self._coming.wait_event(event)


def _copy_back(host: Sequence[Tensors], fetched: Sequence[Tensors]) -> None:
    for there, here in zip(host, fetched, strict=True):
        for kind, value in there.items():
            value.copy_(here[kind], non_blocking=True)
