"""Weights that are not read yet: tensors without values, which know where theirs are.

transformers knows which tensors of a checkpoint are which of a model's, and which it has to put together. Here it is
given tensors to do that with before anything of them is read. What is then cut off one is never read, and what is left
is read once, into its place: a rank holds its own part and no more than one tensor beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

# Of a part, the values are a part of the values: it is taken before a stored type is converted.
_PARTS = (torch.Tensor.__getitem__, torch.Tensor.narrow, torch.Tensor.detach)
_SETTINGS = ("requires_grad_",)


class Unread(torch.Tensor):
    """Of the meta device. What is done to it is done to its values when they are read."""

    _stored: Callable[[], torch.Tensor]  # its values, but for a conversion to its type

    @classmethod
    def of(cls, looks: torch.Tensor, stored: Callable[[], torch.Tensor]) -> Unread:
        unread = looks.to("meta").as_subclass(cls)
        unread._stored = stored
        return unread

    def read(self) -> torch.Tensor:
        """All of it, on the host, in its own type."""
        return self._stored().to(self.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function == torch.Tensor.device.__get__:
            # Where they are read to: transformers takes two tensors of the meta device for two that are not tied.
            return torch.device("cpu")
        name = function.__name__
        if (name.endswith("_") and not name.endswith("__") and name not in _SETTINGS) or name == "__setitem__":
            raise RuntimeError(f"{name} of a weight that is not read yet")
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                looks = function(*_each(given, _on_meta), **_each(named, _on_meta))
        except NotImplementedError:  # it needs the values, as a comparison does
            return function(*_each(given, _values), **_each(named, _values))
        if isinstance(looks, Unread):  # a setting
            return looks

        def stored() -> Any:
            if function == torch.Tensor.to:
                return given[0].read()
            if function in _PARTS:
                return function(given[0]._stored(), *given[1:], **named)
            return function(*_each(given, _values), **_each(named, _values))

        if isinstance(looks, torch.Tensor):
            return cls.of(looks, stored)
        if isinstance(looks, tuple | list) and any(isinstance(look, torch.Tensor) for look in looks):
            return [cls.of(look, partial(_member, stored, number)) for number, look in enumerate(looks)]
        return looks


def _each(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, tuple | list):
        return type(values)(_each(value, change) for value in values)
    if isinstance(values, dict):
        return {name: _each(value, change) for name, value in values.items()}
    return change(values)


def _member(stored: Callable[[], Any], number: int) -> torch.Tensor:
    member: torch.Tensor = stored()[number]
    return member


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("meta")
    if isinstance(value, torch.Tensor) and not isinstance(value, Unread):
        return value.to("meta")
    return value


def _values(value: Any) -> Any:
    return value.read() if isinstance(value, Unread) else value


@torch.no_grad()
def read_into(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Read or not, with its values: in the type they are stored in to the device, and there converted."""
    place.copy_((tensor._stored() if isinstance(tensor, Unread) else tensor).to(place.device))


def read_to(device: torch.device, parameter: torch.Tensor) -> torch.nn.Parameter:
    place = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    read_into(place, parameter)
    return torch.nn.Parameter(place, requires_grad=parameter.requires_grad)


def replace_parameters(
    model: torch.nn.Module, replacement: Callable[[torch.nn.Parameter], torch.nn.Parameter]
) -> Callable[[], None]:
    """A tied one by one. Gives what puts them back, wherever their modules have gone."""
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                made[parameter] = replacement(parameter)
            replaced.append((module, name, parameter))
    for module, name, parameter in replaced:
        setattr(module, name, made[parameter])

    def put_back() -> None:
        for module, name, parameter in replaced:
            setattr(module, name, parameter)

    return put_back


def place_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Read, and where they are computed with. They are small, and every rank has all of them."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, _values(buffer).to(device))


@contextmanager
def unread_files() -> Iterator[None]:
    """Inside, transformers is given the tensors of files unread. That it asks `safe_open` for them is the one thing
    assumed of it; were it to read in another way, models would be whole while they are loaded, and the same."""
    from transformers import modeling_utils

    module: Any = modeling_utils
    honest = module.safe_open
    module.safe_open = lambda *arguments, **options: _File(honest(*arguments, **options))
    try:
        yield
    finally:
        module.safe_open = honest


class _File:
    """In the place of an open file, which stays open for as long as a tensor of it may be read."""

    def __init__(self, opened: Any):
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_slice(self, name: str) -> Unread:
        mapped: torch.Tensor = self._opened.get_tensor(name)  # its values are where the file is until one looks at them
        return Unread.of(torch.empty_like(mapped, device="meta"), lambda: mapped)
