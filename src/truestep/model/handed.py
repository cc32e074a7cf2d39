"""Hands layers what a model's own code drops on its way to them.

A model is given its documents' layout as a keyword argument, which most models pass down to their layers. Some drop it.
Some have a window in the mask that they make, which attention over packed documents does not read, and do not tell
their attention of it. The probe finds these (see `loading.probe`); models with recurrent layers always hand on.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


class _Handed(threading.local):
    """What the running model was given. The backward pass has threads of its own."""

    named: Mapping[str, Any] = {}


_handed = _Handed()


def handed(name: str, value: Any = None) -> Any:
    """Return a keyword argument of a layer: as the model's code passed it on, else as the model was given it."""
    return _handed.named.get(name) if value is None else value


def hand_on(model: Any, **constants: Any) -> None:
    """Hand a model's layers the keyword arguments that the model is given, and constants."""

    def keep(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        _handed.named = constants | named

    def forget(*_: Any) -> None:
        _handed.named = {}

    model.base_model.register_forward_pre_hook(keep, with_kwargs=True)
    model.base_model.register_forward_hook(forget, always_call=True)


class HandedAgain(AbstractContextManager[None]):
    """A context in which layers are handed what they are handed when it is made. `within`: another context to enter.

    The backward pass recomputes a layer in it, without its model and perhaps in another thread."""

    def __init__(self, within: AbstractContextManager[Any]) -> None:
        self._named, self._within = _handed.named, within

    def __enter__(self) -> None:
        self._before, _handed.named = _handed.named, self._named
        self._within.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)
        _handed.named = self._before


def ways(model: Any) -> Iterator[Callable[[], None]]:
    """List what may make a model's attention get what it needs, in the order in which to try it."""
    yield lambda: hand_on(model)
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and not getattr(text, "layer_types", None):
        yield lambda: hand_on(model, sliding_window=window)
