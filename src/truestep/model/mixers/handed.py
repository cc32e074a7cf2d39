"""Hands attention what a model's own code drops on its way.

A model is given its documents' layout as a keyword argument, which most models pass down to their attention. Some drop
it in a layer. Some have a window in the mask that they make, which attention over packed documents does not read, and
do not tell their attention of it. The probe finds such models (see `loading.probe`).
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from truestep.weights.layers import layers_of

_NAMES = ("packed_layout", "paged", "exact", "record")


class _Handed(threading.local):
    """What the running model or layer was given. The backward pass has threads of its own."""

    def __init__(self) -> None:
        self.named: dict[str, Any] = {}

    def keep(self, named: dict[str, Any]) -> None:
        self.named = named


_handed = _Handed()


def handed(name: str, value: Any) -> Any:
    """Return a keyword argument of attention: as the model's code passed it on, else as the model was given it."""
    return _handed.named.get(name) if value is None else value


def hand_on(model: Any, **constants: Any) -> None:
    """Hand a model's attention the keyword arguments that the model is given, and constants."""

    def keep(
        module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = {name: named[name] for name in _NAMES if name in named}
        if found:  # a layer that is computed again in the backward pass is given them too
            _handed.keep(constants | found)
        return arguments, named

    def forget(*_: Any) -> None:
        _handed.keep({})

    body = model.base_model
    for module in (body, *layers_of(model)[1]):
        module.register_forward_pre_hook(keep, with_kwargs=True)
    body.register_forward_hook(forget, always_call=True)


def ways(model: Any) -> Iterator[Callable[[], None]]:
    """List what may make a model's attention get what it needs, in the order in which to try it."""
    yield lambda: hand_on(model)
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and not getattr(text, "layer_types", None):
        yield lambda: hand_on(model, sliding_window=window)
