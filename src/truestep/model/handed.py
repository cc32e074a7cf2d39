"""Passes keyword arguments to layers if the model's own code does not pass them on.

A model gets its documents' layout as a keyword argument, which most models pass down to their layers. Some models drop
it. Some have a sliding window only in the mask that they make; attention over packed documents does not read that mask.
The probe finds these models (see `loading.probe`). Models with recurrent layers always use this.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


class _Handed(threading.local):
    """The running model's keyword arguments. They are per thread, because the backward pass has its own threads."""

    named: Mapping[str, Any] = {}


_handed = _Handed()


def handed(name: str, value: Any = None) -> Any:
    """Return a layer's keyword argument: the value that the layer got, or if that is None, the value that the model
    got."""
    return _handed.named.get(name) if value is None else value


def hand_on(model: Any, **constants: Any) -> None:
    """Make the keyword arguments of each call of a model, and constants, available to its layers."""

    def keep(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        _handed.named = constants | named

    def forget(*_: Any) -> None:
        _handed.named = {}

    model.base_model.register_forward_pre_hook(keep, with_kwargs=True)
    model.base_model.register_forward_hook(forget, always_call=True)


class HandedAgain(AbstractContextManager[None]):
    """A context in which layers get the same keyword arguments as when the context was made. Recomputation in the
    backward pass needs it: it runs a layer without its model, and maybe in another thread. `within`: another context to
    enter."""

    def __init__(self, within: AbstractContextManager[Any]) -> None:
        self._named, self._within = _handed.named, within

    def __enter__(self) -> None:
        self._before, _handed.named = _handed.named, self._named
        self._within.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)
        _handed.named = self._before


def ways(model: Any) -> Iterator[Callable[[], None]]:
    """Yield functions that may give a model's attention its missing arguments, in the order in which to try them."""
    yield lambda: hand_on(model)
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and not getattr(text, "layer_types", None):
        yield lambda: hand_on(model, sliding_window=window)
