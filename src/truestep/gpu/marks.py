"""Marks in the queued work of a GPU. They tell the host how much of that work the GPU has done.

When the GPU reaches a mark, a kernel writes the mark's number to pinned memory, without waiting for queued copies. The
host reads the number without a synchronisation or a driver call, so that it disturbs neither the computation nor the
capture of a CUDA graph.

Listeners are called when the host has queued a layer's work, not when the GPU has done it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from truestep.gpu.pinned_counter import Window
from truestep.process import progress

_asked: dict[int, int] = {}  # the mark that was queued last, by device index
_counted: dict[int, int] = {}  # the last mark that was counted as progress, by device index
_inside = 0  # how many `layers_report` blocks are open


class Listener(Protocol):
    """An object that is notified of a pass's progress, so that it can queue other work on the GPU meanwhile."""

    def layer_ended(self) -> None:
        """Called when the host has queued a layer's forward or backward pass."""

    def last_backward(self, weights: Any) -> None:
        """Called when this rank begins the step's last backward pass through these weights."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """Register a listener. Only a weak reference to it is kept."""
    _listeners.add(listener)


def last_backward(weights: Any) -> None:
    for listener in list(_listeners):
        listener.last_backward(weights)


@cache
def _reached(index: int) -> Window:
    return Window(torch.device("cuda", index))


def mark(kind: str, device: torch.device) -> None:
    """Count the work queued so far as progress. On a CPU it counts at once, on a GPU when the GPU has done it."""
    if device.type != "cuda":
        progress.made(kind)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        return
    window = _reached(index)  # created before `_asked` is set, after which another thread may read it
    _asked[index] = _asked.get(index, 0) + 1
    window.inside.fill_(_asked[index])


def outstanding() -> bool:
    """Count marks reached since the last call as progress. Return whether some device has marks still to reach."""
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
    """Enable `layer_done` inside the block."""
    global _inside
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1


def layer_done(layer: torch.nn.Module, arguments: Any, output: Any) -> None:
    """Mark the end of a layer's forward pass and, if its output requires a gradient, of the backward pass up to that
    output. This is a forward hook."""
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
