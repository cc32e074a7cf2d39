"""Moves tensors between host and device beside the computation: while one load is worked on, the next is on its way,
and the one before goes back.

Much of the way is covered while the model computes. The first loads come during the last backward pass of a step, and
the last ones go back during the next step's first passes: as far as there is room, which is what other steps have taken
at the ends of their layers, and what the conveyor is given. The most memory that a run takes grows by that alone.
Whoever reads what is on its way back calls `settle` before.

On a CPU host and device are one. A load is copied there and back all the same, so that the code that moves it is the
same code, and gives the same numbers bit for bit.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from truestep.gpu.memory import device_memory
from truestep.process import progress

Tensors = dict[str, torch.Tensor]
# What is moved, and the work on its copies on the device, which changes them in place.
Load = tuple[Sequence[Tensors], Callable[[Sequence[Tensors]], None]]

_GOING = 2  # loads that may be on their way back whatever memory they take
_FILLED = 0.9  # of a device's memory, beyond which loads never fill it: its allocator holds more than is in use


class Lanes(Protocol):
    """The ways between host and device."""

    def fetch(self, load: Sequence[Tensors]) -> tuple[list[Tensors], Any]:
        """Begin to copy a load to the device. Give its copies, and the event after which they are there."""

    def arrive(self, event: Any) -> None:
        """Have the device wait for copies before it does what it is asked for next."""

    def send(self, host: Sequence[Tensors], copies: Sequence[Tensors]) -> Any:
        """Begin to copy a load back, after what the device was asked for. Give the event after which it is there."""

    def is_back(self, event: Any) -> bool: ...

    def wait(self, event: Any) -> None:
        """Wait until a load is back."""

    def used(self) -> int:
        """Count the bytes of the device's memory that are in use."""

    def holds(self) -> int:
        """Count the bytes that the device's memory may be filled to."""


class Conveyor:
    def __init__(self, device: torch.device, reserve: int = 0, room: int = 0):
        """`reserve`: bytes that a pass takes beyond what is in use at the ends of its layers. `room`: bytes that loads
        may take beyond the most that was in use without them."""
        self._reserve, self._room = reserve, room
        self._lanes: Lanes = Streams(device) if device.type == "cuda" else Here()
        self._wanted: deque[Sequence[Tensors]] = deque()  # what may come before its work is asked for
        self._ahead: deque[tuple[list[Tensors], Any]] = deque()  # what came so
        # What is on its way back, from where and to where: kept until it is there.
        self._going: deque[tuple[Any, Sequence[Tensors], Sequence[Tensors]]] = deque()
        self._most = 0  # bytes in use at the end of a layer, at most, while no load was on the device
        self._own: int | None = None  # bytes in use beside loads, at the end of the last layer or update
        self._rise = 0  # by so many the last layer made them grow
        self._first_rise = 0  # and the first layer after an update
        self._updated = False  # no layer has ended since the last update

    def come(self, loads: Iterable[Sequence[Tensors]]) -> None:
        """Fetch loads, in the order in which they will be worked on, whenever a layer ends and leaves room."""
        self.forget()
        self._wanted.extend(loads)

    def layer_ended(self) -> None:
        """Use the time in which a layer computes: the host has just asked for that."""
        own = self._own_bytes()
        self._rise = 0 if self._own is None else max(0, own - self._own)  # the next one may take as much
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
            except torch.OutOfMemoryError:  # in pieces that are too small: it comes in its own time
                self._wanted.clear()

    def run(self, loads: Iterable[Load]) -> None:
        """Do the work of each load, in order, on copies on the device, and begin to put them back."""
        self._wanted.clear()
        self.settle()
        self._rise = self._first_rise  # what comes behind it is a layer, of which nobody hears before it ends
        try:
            waiting: Load | None = None  # its copies are the first that came ahead
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
            self.forget()  # no later run must take what came for this one
            raise

    def _fetch(self, load: Sequence[Tensors]) -> None:
        try:
            self._take(load)
        except torch.OutOfMemoryError:  # unless what is on its way back has the memory
            self.settle()
            self._take(load)

    def _take(self, load: Sequence[Tensors]) -> None:
        self._ahead.append(self._lanes.fetch(load))

    def _own_bytes(self) -> int:
        """Count what is in use beside the loads that are on the device."""
        loads = sum(_size(copies) for copies, _ in self._ahead) + sum(_size(copies) for _, copies, _ in self._going)
        return self._lanes.used() - loads

    def settle(self) -> None:
        """Wait until all is back on the host."""
        if self._going:
            with progress.waiting_for("the optimizer's state to come back to the host's memory"):
                while self._going:
                    self._free_first()

    def forget(self) -> None:
        """Let go of what came ahead."""
        self.settle()
        self._wanted.clear()
        while self._ahead:
            self._lanes.wait(self._ahead[0][1])
            self._ahead.popleft()

    def _work(self, load: Load) -> None:
        """Work on what came first, and send it back."""
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
        """Wait until the first load is back, and free its copies."""
        self._lanes.wait(self._going[0][0])
        self._going.popleft()


class Streams:
    """The ways to a GPU and back: a stream each, since it has an engine of copies for each."""

    def __init__(self, device: torch.device):
        self._device = device
        self._holds = int(_FILLED * device_memory(device))
        self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def fetch(self, load: Sequence[Tensors]) -> tuple[list[Tensors], Any]:
        # Memory of the stream that computes, which uses it before and after: it is free when that stream is here.
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
        # torch.cuda.memory_allocated, without its sorting of a hundred other figures.
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"])

    def holds(self) -> int:
        return self._holds


class Here:
    """A device that is the host: what is copied is there at once, and there is no room to gain."""

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
