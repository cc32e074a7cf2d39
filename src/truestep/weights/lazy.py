"""Unread weights: meta tensors that record how to read their values from a checkpoint.

transformers renames a checkpoint's tensors and combines some. Here it does so with unread tensors, and the operations
are recorded. A rank then cuts its part, and reads only that part, once, into its final memory. So a rank's memory holds
only its own part and the few tensors that are being read.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from truestep.process import progress

# Operations that only move or select values. They run in the stored dtype. Only their result, which may be smaller, is
# converted.
_MOVES = (
    torch.Tensor.__getitem__,
    torch.Tensor.narrow,
    torch.Tensor.detach,
    torch.Tensor.contiguous,
    torch.Tensor.transpose,
    torch.chunk,
    torch.stack,
    torch.cat,
)
_EMPTY = (torch.empty_like, torch.Tensor.new_empty)
_SETTINGS = ("requires_grad_",)
_READERS = 4  # tensors read at a time
_MAPPED = 2**26  # bytes read from a mapped file before it is reopened, which frees the pages read


# Takes a view of a tensor, and returns a function that reads only the view; None if that is not possible.
Narrower = Callable[[torch.Tensor], Callable[[], torch.Tensor] | None]


class UnreadError(RuntimeError):
    """Raised if code changes a weight that is not read yet."""


class Unread(torch.Tensor):
    """A meta tensor that records operations, and applies them to its values when these are read."""

    # A function that reads the values in the stored dtype; and a `Narrower` for views, or None.
    _stored: tuple[Callable[[], torch.Tensor], Narrower | None]

    @classmethod
    def of(
        cls,
        looks: torch.Tensor,
        stored: Callable[[], torch.Tensor],
        narrower: Narrower | None = None,
    ) -> "Unread":
        """Make an unread tensor. Without a `narrower`, reading a view reads the whole tensor first."""
        unread = looks.to("meta").as_subclass(cls)
        unread._stored = stored, narrower
        return unread

    def read(self) -> torch.Tensor:
        """Read the whole tensor to the host, converted to the tensor's type."""
        return self._stored[0]().to(self.dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function == torch.Tensor.device.__get__:
            # The device to which values are read. With "meta", transformers would never treat two tensors as tied.
            return torch.device("cpu")
        name = function.__name__
        in_place = name.endswith("_") and not name.endswith("__") and name not in _SETTINGS
        if in_place or name == "__setitem__" or function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise UnreadError(f"{name} of a weight that is not read yet")
        try:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                looks = function(*_each(_on_meta, arguments), **_each(_on_meta, named))
        except NotImplementedError:  # the operation needs values, for example a comparison
            return function(*_each(_values, arguments), **_each(_values, named))
        if function in _EMPTY:  # initial values: none are needed, because the weight is read from a file
            return looks
        if isinstance(looks, Unread):  # `requires_grad_` returns the tensor itself
            return looks

        def stored() -> Any:
            if function == torch.Tensor.to:
                return arguments[0].read()
            if function in _MOVES:
                as_stored = _each(_as_stored, arguments)
                if (
                    len(_types(as_stored)) == len(_types(arguments)) == 1
                ):  # one stored dtype: compute in it, then convert the result
                    return function(*as_stored, **named)
            return function(*_each(_values, arguments), **_each(_values, named))

        if isinstance(looks, torch.Tensor):
            narrower = _narrower_of(function, arguments)
            alone = None if narrower is None else narrower(looks)
            return cls.of(looks, stored) if alone is None else cls.of(looks, alone, narrower)
        if isinstance(looks, tuple | list) and any(isinstance(look, torch.Tensor) for look in looks):
            return [cls.of(look, partial(_member, stored, number)) for number, look in enumerate(looks)]
        return looks


def _narrower_of(function: Any, arguments: Any) -> Narrower | None:
    """Return the narrower of the tensor that this operation takes a view of; None for other operations."""
    views = (torch.Tensor.__getitem__, torch.Tensor.narrow, torch.Tensor.detach)
    return arguments[0]._stored[1] if function in views and isinstance(arguments[0], Unread) else None


def _member(stored: Callable[[], Any], number: int) -> Any:
    return stored()[number]


def _each(change: Callable[[Any], Any], values: Any) -> Any:
    """Change each value in tuples, lists and dictionaries, as torch's `tree_map` does in ten times the time."""
    if type(values) is dict:
        return {name: _each(change, value) for name, value in values.items()}
    return type(values)(_each(change, value) for value in values) if type(values) in (tuple, list) else change(values)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return torch.device("meta")
    if isinstance(value, torch.Tensor) and not isinstance(value, Unread):
        return value.to("meta")
    return value


def _values(value: Any) -> Any:
    return value.read() if isinstance(value, Unread) else value


def _as_stored(value: Any) -> Any:
    return value._stored[0]() if isinstance(value, Unread) else value


def _types(values: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


@torch.no_grad()
def read_into(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor, read or unread, into `place`. Values are sent to the device in their stored dtype, and converted
    there."""
    place.copy_((tensor._stored[0]() if isinstance(tensor, Unread) else tensor).to(place.device))
    progress.made("bytes read", place.nbytes)


def read_all(tensors: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Read the tensors that are the mapping's keys into the tensors that are its values."""
    with ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(read_into, tensors.values(), tensors))


def read_parameters(
    model: torch.nn.Module,
    device: torch.device,
    lent: Mapping[torch.nn.Parameter, torch.nn.Parameter] | None = None,
    frozen_dtype: torch.dtype | None = None,
    held: Mapping[str, torch.Tensor] | None = None,
) -> Callable[[], None]:
    """Read each parameter of a model. `lent` maps parameters to those that are read in their place. Frozen parameters
    are stored in `frozen_dtype`, if given. Frozen parameters with names in `held` are not read; they share the tensors
    of `held`. Return a function that puts the unread parameters back."""
    places: dict[torch.Tensor, torch.nn.Parameter] = {}
    shared = {parameter: held[name] for name, parameter in model.named_parameters() if name in held} if held else {}

    def place(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if not parameter.requires_grad and isinstance(there := shared.get(parameter), torch.nn.Parameter):
            return there
        owner = (lent or {}).get(parameter, parameter)
        if owner not in places:
            kept = owner.dtype if owner.requires_grad or frozen_dtype is None else frozen_dtype
            empty = torch.empty(owner.shape, dtype=kept, device=device)
            places[owner] = torch.nn.Parameter(empty, requires_grad=owner.requires_grad)
        return places[owner]

    put_back = replace_parameters(model, place)
    read_all(places)
    return put_back


def replace_parameters(
    model: torch.nn.Module, replacement: Callable[[torch.nn.Parameter], torch.nn.Parameter]
) -> Callable[[], None]:
    """Replace each parameter of a model; a tied one gets one replacement. Return a function that puts the originals
    back, also in modules that have since been removed from the model."""
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    replacements: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in replacements:
                replacements[parameter] = replacement(parameter)
            replaced.append((module, name, parameter))
    for module, name, parameter in replaced:
        setattr(module, name, replacements[parameter])

    def put_back() -> None:
        for module, name, parameter in replaced:
            setattr(module, name, parameter)

    return put_back


def place_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Read all buffers onto the device. They are small, so every rank has all of them."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, _values(buffer).to(device))


@contextmanager
def unread_files() -> Iterator[None]:
    """Make transformers load files as unread tensors within the block, by patching its `safe_open`. If a version of
    transformers does not use `safe_open`, it loads the same model, but reads all of it at once."""
    from transformers import modeling_utils

    module: Any = modeling_utils
    honest = module.safe_open
    module.safe_open = lambda *arguments, **options: _File(partial(honest, *arguments, **options))
    try:
        yield
    finally:
        module.safe_open = honest


class _File:
    """Replaces transformers' file handle. It stays open after `__exit__`, for tensors that are read later."""

    def __init__(self, opened: Callable[[], Any]):
        self._open = opened
        self._opened = opened()
        self._looked_at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_slice(self, name: str) -> "Unread":
        # `get_tensor` maps the file: no value is read here.
        return Unread.of(self._opened.get_tensor(name).to("meta"), partial(self._mapped, name))

    def _mapped(self, name: str) -> torch.Tensor:
        """Map a tensor. Pages that are read count as this process's memory until the file is closed."""
        if self._looked_at > _MAPPED:
            self._opened, self._looked_at = self._open(), 0
        tensor: torch.Tensor = self._opened.get_tensor(name)
        self._looked_at += tensor.nbytes
        return tensor


@contextmanager
def weights_without_values() -> Iterator[None]:
    """Put the weights of modules that are made within the block on the meta device. Buffers keep their values, because
    a constructor may compute them."""
    module: Any = torch.nn.Module
    honest = module.register_parameter

    def register(self: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        # a tied parameter that is already on meta must stay the same object
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        honest(self, name, parameter)

    module.register_parameter = register
    try:
        yield
    finally:
        module.register_parameter = honest
