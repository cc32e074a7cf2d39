"""Objects of this program that a configuration uses but that cannot be imported: a lambda, a closure, an object with
state, a function of a notebook.

The configuration has a name for each object, such as `this-program:score`. Child processes get the objects as bytes of
cloudpickle, and unpickle them. They send no objects back, so this process unpickles nothing.
"""

import base64
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from truestep.errors import TruestepError

_PROGRAM = "this-program"  # no module can have this name

_objects: dict[str, Any] = {}  # by name
_received: dict[str, str] = {}  # objects from the parent process: pickled bytes in base64, by name


class HeldError(TruestepError):
    """An object that this process does not have, or that cannot be sent to another process."""


def is_held(name: str) -> bool:
    return name.startswith(f"{_PROGRAM}:")


def hold(given: Any) -> str:
    """Keep an object, and return its name. The same object always has the same name."""
    for name, held in _objects.items():
        if held is given or (isinstance(given, MethodType) and held == given):
            return name
    label = name = f"{_PROGRAM}:{label_of(given)}"
    number = 1
    while name in _objects:
        number += 1
        name = f"{label}-{number}"
    _objects[name] = given
    return name


@contextmanager
def forgotten() -> Iterator[None]:
    """Return a context. At its end, the objects that were held within it are forgotten."""
    before = set(_objects)
    try:
        yield
    finally:
        for name in _objects.keys() - before:
            del _objects[name]


def label_of(given: Any) -> str:
    """Return a name for an object: its own, or that of its class."""
    while isinstance(given, partial):
        given = given.func
    name = getattr(given, "__name__", None)
    return name.strip("<>") if isinstance(name, str) and name else type(given).__name__


def find(name: str) -> Any:
    """Return the object with a name. Unpickling one that was received may raise anything."""
    if name not in _objects and name in _received:
        import pickle  # imported late: only processes that were sent an object need it

        _objects[name] = pickle.loads(base64.b64decode(_received[name]))
    if name not in _objects:
        raise HeldError(
            f"{name!r} is an object of the Python program that made this configuration. Start that program again, or "
            "give the import path of code that stands in a module: package.module:function"
        )
    return _objects[name]


def receive(objects: dict[str, str]) -> None:
    """Store the objects from the parent process. Each is unpickled when it is first needed."""
    _received.update(objects)


def packed(names: Iterable[str]) -> dict[str, str]:
    """Return objects as other processes receive them. Raises HeldError for one that cannot be sent."""
    return {name: _received.get(name) or _packed(name) for name in names if is_held(name)}


def packed_all() -> dict[str, str]:
    """Return all objects that can be sent."""
    found: dict[str, str] = dict(_received)
    for name in _objects.keys() - _received.keys():
        try:
            found[name] = _packed(name)
        except HeldError:  # perhaps no other process needs it; one that does reports that it is missing
            continue
    return found


def _packed(name: str) -> str:
    import cloudpickle  # imported late: few configurations need it

    held = find(name)
    try:
        return base64.b64encode(cloudpickle.dumps(held)).decode()
    except Exception as error:  # pickling may run code of the object, which can raise anything
        raise HeldError(
            f"{name.partition(':')[2]} cannot be sent to a process of its own: {type(error).__name__}: {error}. Make "
            "its objects inside the function, or call it in this process: train(..., isolated=False)"
        ) from error
