"""Copies optimizer state between host and device on side streams. A load is the state that one update needs. While one
load is updated, the next load is copied to the device and the previous load is copied back.

Copies also overlap with the model's passes. The first loads are fetched during the last backward pass of a step, and
the last loads are copied back during the first passes of the next step, if memory allows. Passes and loads together use
at most `room` bytes more than the passes alone, measured at layer ends. Call `settle` before reading the state on the
host, because copies back may be in flight.

On a CPU, loads are copied too, so that CPU and GPU run the same code.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from truestep.gpu.memory import device_memory
from truestep.process import progress

Tensors = dict[str, torch.Tensor]
# Tensors on the host, and a function that updates copies of them on the device in place.
Load = tuple[Sequence[Tensors], Callable[[Sequence[Tensors]], None]]

_GOING = 2  # the largest number of copies back to the host in flight, if memory is short
_FILLED = 0.9  # share of device memory that loads may fill; the allocator reserves more than is in use


class Lanes(Protocol):
    """Copies in both directions between host and device."""

    def fetch(self, load: Sequence[Tensors]) -> tuple[list[Tensors], Any]:
        """Start copying a load to the device. Return the device copies and the event that marks the end."""

    def arrive(self, event: Any) -> None:
        """Make the device wait for the copies' event before later work."""

    def send(self, host: Sequence[Tensors], copies: Sequence[Tensors]) -> Any:
        """Start copying a load back after the work already enqueued. Return the event that marks the end."""

    def is_back(self, event: Any) -> bool: ...

    def wait(self, event: Any) -> None:
        """Block the host until the event of a copy back."""

    def used(self) -> int:
        """Return the bytes of device memory in use."""

    def holds(self) -> int:
        """Return the limit for bytes of device memory in use."""


class Conveyor:
    """A queue of loads that are copied to the device, updated, and copied back."""

    def __init__(self, device: torch.device, reserve: int = 0, room: int = 0):
        """`reserve`: bytes that a pass allocates above the usage at layer ends. `room`: bytes by which loads may raise
        the peak."""
        self._reserve, self._room = reserve, room
        self._lanes: Lanes = Streams(device) if device.type == "cuda" else Here()
        self._wanted: deque[Sequence[Tensors]] = deque()  # loads that may be fetched before `run`
        self._ahead: deque[tuple[list[Tensors], Any]] = deque()  # fetched loads, not yet updated: device copies, event
        # Copies back in flight: event, device copies, host tensors. Device copies are kept until the event.
        self._going: deque[tuple[Any, Sequence[Tensors], Sequence[Tensors]]] = deque()
        self._most = 0  # peak bytes in use at layer ends while no load was on the device
        self._own: int | None = None  # bytes in use without loads, at the end of the last layer or update
        self._rise = 0  # growth of `_own` over the last layer
        self._first_rise = 0  # growth of `_own` over the first layer after an update
        self._updated = False  # True if no layer has ended since the last update

    def come(self, loads: Iterable[Sequence[Tensors]]) -> None:
        """Queue loads, in the order of their updates, to be fetched at layer ends when memory allows."""
        self.forget()
        self._wanted.extend(loads)

    def layer_ended(self) -> None:
        """Start copies that overlap with the kernels the host has just launched for a layer."""
        own = self._own_bytes()
        self._rise = 0 if self._own is None else max(0, own - self._own)  # estimate for the next layer
        if self._updated:
            self._updated, self._first_rise = False, self._rise
        self._own = own
        self._free_what_is_back()
        while self._going and not self._fits(0):
            self._free_first()
        if not self._going and not self._ahead:
            self._most = max(self._most, own)
        while self._wanted and self._fits(_size(self._wanted[0])):
            try:
                self._take(self._wanted.popleft())
            except torch.OutOfMemoryError:  # fragmented memory: `run` will fetch the load
                self._wanted.clear()

    def run(self, loads: Iterable[Load]) -> None:
        """Update each load in order on device copies, and start copying them back."""
        self._wanted.clear()
        self.settle()
        self._rise = self._first_rise  # no measurement until the next layer ends
        try:
            waiting: Load | None = None  # the load whose device copies are `_ahead[0]`
            for load in loads:
                if len(self._ahead) < (1 if waiting is None else 2):
                    self._fetch(load[0])
                if waiting is not None:
                    self._work(waiting)
                waiting = load
            if waiting is not None:
                self._work(waiting)
            self._own, self._updated = self._own_bytes(), True
        except BaseException:
            self.forget()  # a later run must not use the loads of this run
            raise

    def _fetch(self, load: Sequence[Tensors]) -> None:
        try:
            self._take(load)
        except torch.OutOfMemoryError:  # retry after copies back have freed their memory
            self.settle()
            self._take(load)

    def _take(self, load: Sequence[Tensors]) -> None:
        self._ahead.append(self._lanes.fetch(load))

    def _own_bytes(self) -> int:
        """Return the bytes in use on the device except loads."""
        loads = sum(_size(copies) for copies, _ in self._ahead) + sum(_size(copies) for _, copies, _ in self._going)
        return self._lanes.used() - loads

    def settle(self) -> None:
        """Wait for all copies back to the host."""
        if self._going:
            with progress.waiting_for("the optimizer's state to come back to the host's memory"):
                while self._going:
                    self._free_first()

    def forget(self) -> None:
        """Drop queued and fetched loads."""
        self.settle()
        self._wanted.clear()
        while self._ahead:
            self._lanes.wait(self._ahead[0][1])
            self._ahead.popleft()

    def _work(self, load: Load) -> None:
        """Update the first fetched load, and start copying it back."""
        (host, work), (copies, there) = load, self._ahead[0]
        self._lanes.arrive(there)
        work(copies)
        self._ahead.popleft()
        if not _size(host):
            return
        self._going.append((self._lanes.send(host, copies), copies, host))
        self._free_what_is_back()
        while len(self._going) > _GOING and not self._fits(0):
            self._free_first()

    def _fits(self, more: int) -> bool:
        most = max(self._most, min(self._most + self._room, self._lanes.holds()))
        return self._lanes.used() + more <= most - self._reserve - self._rise

    def _free_what_is_back(self) -> None:
        while self._going and self._lanes.is_back(self._going[0][0]):
            self._free_first()

    def _free_first(self) -> None:
        """Wait for the oldest copy back, and free its device copies."""
        self._lanes.wait(self._going[0][0])
        self._going.popleft()


class Streams:
    """Copies to and from a GPU: a side stream per direction, since each direction has a copy engine."""

    def __init__(self, device: torch.device):
        self._device = device
        self._holds = int(_FILLED * device_memory(device))
        self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def fetch(self, load: Sequence[Tensors]) -> tuple[list[Tensors], Any]:
        # Allocated on the compute stream, which may still use this memory: the side stream waits for that stream first.
        copies = [
            {kind: torch.empty_like(value, device=self._device, pin_memory=False) for kind, value in tensors.items()}
            for tensors in load
        ]
        self._coming.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._coming):
            _copy(copies, load)
        return copies, self._coming.record_event()

    def arrive(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def send(self, host: Sequence[Tensors], copies: Sequence[Tensors]) -> Any:
        self._going.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._going):
            _copy(host, copies)
        return self._going.record_event()

    def is_back(self, event: Any) -> bool:
        return bool(event.query())

    def wait(self, event: Any) -> None:
        event.synchronize()

    def used(self) -> int:
        # Same as torch.cuda.memory_allocated, which sorts a hundred other statistics.
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"])

    def holds(self) -> int:
        return self._holds


class Here:
    """Copies within the host, for CPU runs: synchronous, without a memory limit."""

    def fetch(self, load: Sequence[Tensors]) -> tuple[list[Tensors], Any]:
        return [{kind: value.clone() for kind, value in tensors.items()} for tensors in load], None

    def arrive(self, event: Any) -> None:
        return

    def send(self, host: Sequence[Tensors], copies: Sequence[Tensors]) -> Any:
        _copy(host, copies)

    def is_back(self, event: Any) -> bool:
        return True

    def wait(self, event: Any) -> None:
        return

    def used(self) -> int:
        return 1

    def holds(self) -> int:
        return sys.maxsize


def _copy(there: Sequence[Tensors], here: Sequence[Tensors]) -> None:
    for targets, sources in zip(there, here, strict=True):
        for kind, target in targets.items():
            target.copy_(sources[kind], non_blocking=True)


def _size(load: Sequence[Tensors]) -> int:
    return sum(value.nbytes for tensors in load for value in tensors.values())
