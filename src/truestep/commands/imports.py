"""Shortens the imports of a new process, which take most of the time until a small model's first step.

- The garbage collector is off meanwhile: it would visit all modules again and again, a fifth of the time.
- transformers reads the source of all of its models, twice, to list the names that they define. The list is kept in the
  user's cache, with the size and time of each of these files.
- Some versions of transformers import scikit-learn for a kind of sampling that is not used here.

What is changed in transformers is private to it. A version without these names is imported as it is.
"""

import contextlib
import gc
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from truestep.files.whole import write_whole
from truestep.process.bytecode import cache_directory


@contextmanager
def importing() -> Iterator[None]:
    """Import torch and transformers faster inside the block. The modules are then frozen, so that the collector does
    not visit them later. A process that has imported torch before is left as it is."""
    if "torch" in sys.modules:
        yield
        return
    collects, hooks = gc.isenabled(), _Hooks()
    gc.disable()
    sys.meta_path.insert(0, hooks)
    try:
        yield
    finally:
        sys.meta_path.remove(hooks)
        gc.freeze()
        if collects:
            gc.enable()


class _Hooks(importlib.abc.MetaPathFinder):
    """Calls a function after a module was executed, or before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _EXECUTE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute, around = spec.loader.exec_module, _EXECUTE[name]
            spec.loader.exec_module = lambda module: around(execute, module)  # type: ignore[method-assign]
        return spec


def _with_kept_names(execute: Callable[[ModuleType], None], module: Any) -> None:
    execute(module)
    with contextlib.suppress(AttributeError):
        read = module.create_import_structure_from_path

        @cache
        def structure(path: str | os.PathLike[str]) -> Any:
            place = Path(path).parent if Path(path).is_file() else Path(path)
            return of_models(place) if place.name == "models" else read(path)

        @cache
        def of_models(place: Path) -> Any:
            return kept_names(place, read)

        module.create_import_structure_from_path = structure


def _without_scikit_learn(execute: Callable[[ModuleType], None], module: Any) -> None:
    utils: Any = sys.modules.get("transformers.utils")
    before = getattr(utils, "is_sklearn_available", None)
    if before is None:
        return execute(module)
    utils.is_sklearn_available = lambda: False
    try:
        execute(module)
    finally:
        utils.is_sklearn_available = before


_EXECUTE = {
    "transformers.utils.import_utils": _with_kept_names,
    "transformers.generation.candidate_generator": _without_scikit_learn,
}


def kept_names(place: Path, read: Callable[[Path], Any]) -> Any:
    """Return what `read` finds in a directory of sources, from the user's cache if no source has changed since. Where
    the cache cannot be used, for whatever reason, `read` is called."""
    file = state = None
    with contextlib.suppress(Exception):
        file = cache_directory() / "imports" / f"{hashlib.sha256(str(place).encode()).hexdigest()[:16]}.json"
        state = _state(place)
        kept = json.loads(file.read_bytes())
        if kept["state"] == state:
            return _decoded(kept["names"])
    found = read(place)
    if file is not None and state is not None:
        with contextlib.suppress(Exception):  # a full disk, or a directory that cannot be written to
            write_whole(file, json.dumps({"state": state, "names": _encoded(found)}).encode())
    return found


def _state(place: Path) -> str:
    """Return a digest of the names, sizes and times of all files below a directory."""
    found, folders = [], [str(place)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders += [entry.path] if entry.name != "__pycache__" else []
                else:
                    status = entry.stat()
                    found.append((entry.path, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def _encoded(value: Any) -> Any:
    """Convert nested dictionaries and sets of text to what JSON holds."""
    if isinstance(value, dict):
        return {"pairs": [[_encoded(key), _encoded(inner)] for key, inner in value.items()]}
    if isinstance(value, set | frozenset):
        return {type(value).__name__: sorted(value)}
    if isinstance(value, str):
        return value
    raise TypeError(f"{type(value).__name__} is not kept")


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return value
    ((kind, content),) = value.items()
    if kind == "pairs":
        return {_decoded(key): _decoded(inner) for key, inner in content}
    return {"set": set, "frozenset": frozenset}[kind](content)
