"""Marks in the work of a device: how far it has come, which the host does not know from having asked for the work.

A mark writes its number to the host's memory when the device comes to it: by a kernel, which waits for no copies.
Reading that memory waits for nothing and calls no driver: it disturbs neither a computation nor a graph that is being
captured.

Those who listen are told when the host has asked for a layer's work.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from truestep.gpu.pinned_counter import Window
from truestep.process import progress

_asked: dict[int, int] = {}  # the last mark that was asked for, by device
_counted: dict[int, int] = {}  # and the last one that was counted as progress
_inside = 0  # passes under way whose layers report


class Listener(Protocol):
    """One who has something to do beside a pass. It is told as the host asks for the work, not as that is done."""

    def layer_ended(self) -> None:
        """Hear of the end of a layer's forward or backward pass."""

    def last_backward(self, weights: Any) -> None:
        """Hear that a step's last backward pass through these weights begins on this rank."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """Tell a listener of passes from now on, for as long as it is there."""
    _listeners.add(listener)


def last_backward(weights: Any) -> None:
    for listener in list(_listeners):
        listener.last_backward(weights)


@cache
def _reached(index: int) -> Window:
    return Window(torch.device("cuda", index))


def mark(kind: str, device: torch.device) -> None:
    """Report a piece of work as progress: at once on a CPU, and when it is done on a device."""
    if device.type != "cuda":
        progress.made(kind)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return
    window = _reached(index)  # before another thread may look for it
    _asked[index] = _asked.get(index, 0) + 1
    window.inside.fill_(_asked[index])


def outstanding() -> bool:
    """Count the marks that devices came to since the last call, and tell whether one still has some to come to."""
    still = False
    for index, asked in list(_asked.items()):
        reached = _reached(index).number
        if reached != _counted.get(index, 0):
            _counted[index] = reached
            progress.made("pieces of work on a device")
        still |= reached != asked
    return still


@contextmanager
def layers_report() -> Iterator[None]:
    """Have each layer that `report_layers` was given mark its work inside."""
    global _inside
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1


def layer_done(layer: torch.nn.Module, arguments: Any, output: Any) -> None:
    """Mark a layer's forward pass, and where its output has a gradient, the backward pass of all that is behind it."""
    if not _inside:
        return
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, torch.Tensor):
        return
    device = hidden.device
    _ended(device)
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: _ended(device))


def _ended(device: torch.device) -> None:
    mark("layers", device)
    for listener in list(_listeners):
        listener.layer_ended()
