"""Imports users' own code by the import paths in the configuration, and checks its options."""

import contextlib
import importlib
import inspect
import os
import sys
import sysconfig
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from pathlib import Path
from types import ModuleType
from typing import Any

from truestep.config import held
from truestep.errors import TruestepError

_own_directories: set[str] = set()
_ENDINGS = tuple(all_suffixes())  # file name endings of modules


class CustomError(TruestepError):
    """User code that cannot be loaded or used."""


class _UsersModules:
    """Imports modules from the user's directories, after all others: they cannot replace an installed module.

    Only modules that existed when the run started are imported. So a file written later, for example by code that a
    reward runs, cannot pose as an optional package that is not installed.
    """

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}  # module names by directory

    def add(self, directory: str) -> None:
        self._names[directory] = frozenset(_modules_in(directory))

    @property
    def directories(self) -> list[str]:
        return list(self._names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        places = [directory for directory, names in self._names.items() if fullname in names]
        return PathFinder.find_spec(fullname, places, target) if places and path is None else None


_users_modules = _UsersModules()


def _modules_in(directory: str) -> set[str]:
    """Return the names that can be imported from a directory; folders without an __init__.py are packages too."""
    with contextlib.suppress(OSError):
        entries = list(os.scandir(directory))
        return {entry.name.partition(".")[0] for entry in entries if entry.is_dir() or entry.name.endswith(_ENDINGS)}
    return set()


def keep_path_clean() -> Callable[[], None]:
    """Remove the working directory and the program's directory from sys.path; return a function that puts them back.

    Python has one of them first on the path, and other code, such as a reward's, may write to them during a run.
    Modules that exist there now can still be imported, after all installed ones.
    """
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    own = {Path.cwd(), *([] if program is None else [Path(program).resolve().parent])}
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    before = list(sys.path)
    moved = [entry for entry in before if Path(entry).resolve() in own - installed or not os.path.isabs(entry)]
    # A new list: another thread that imports goes through the old one, and would skip entries of a list that shrinks.
    sys.path = [entry for entry in before if entry not in moved]
    for directory in {str(Path(entry).resolve()): None for entry in (str(Path.cwd()), *moved)}:
        add_directory(directory)

    def put_back() -> None:
        path = list(sys.path)
        for entry in reversed(moved):
            path.insert(min(before.index(entry), len(path)), entry)
        sys.path = path

    return put_back


def add_directory(directory: str) -> None:
    """Make the modules of a user's directory importable, after all others."""
    _users_modules.add(directory)
    if _users_modules not in sys.meta_path:
        sys.meta_path.append(_users_modules)


def user_directories() -> list[str]:
    """List the directories given to `add_directory`, so that a child process can add them too."""
    return _users_modules.directories


def own_directories() -> tuple[str, ...]:
    """List the directories of the packages that the user's code was loaded from, which may be installed packages."""
    return tuple(_own_directories)


def load_custom(option: str, name: str) -> Any:
    """Import `package.module:object`, given as `name` for `option`. The working directory is searched too. An object
    that this program holds (`held`) is found by its name."""
    if held.is_held(name):
        return _load_held(option, name)
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise CustomError(f"{option} {name!r}: write it as package.module:function")
    add_directory(str(Path.cwd()))  # a console script does not have it on its path
    try:
        module = importlib.import_module(module_name)
    except CustomError:  # raised by a module of ours: its message says what is missing
        raise
    except ImportError as error:
        stem = module_name.removesuffix(".py").replace("/", ".").strip(".")
        hint = f"; write {stem}:{attribute}" if module_name.endswith(".py") else ""
        if not hint and error.name == module_name.partition(".")[0]:
            hint = ": it is searched in the working directory and among the installed packages"
        raise CustomError(f"{option} {name!r}: {error}{hint}") from error
    except (Exception, SystemExit) as error:  # the module is the user's: importing it can raise anything
        problem = f"importing {module_name} raised {type(error).__name__}: {error}"
        raise CustomError(f"{option} {name!r}: {problem}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        kind = "class" if attribute[:1].isupper() else "function"
        raise CustomError(f"{option} {name!r}: {module_name} has no {kind} {attribute}")
    package = sys.modules.get(module_name.partition(".")[0])
    for directory in getattr(package, "__path__", ()):
        _own_directories.add(str(Path(directory)) + os.sep)
    return found


def _load_held(option: str, name: str) -> Any:
    try:
        return held.find(name)
    except held.HeldError as error:
        raise CustomError(f"{option} {error}") from None
    except (Exception, SystemExit) as error:  # unpickling runs the user's code
        raise CustomError(f"{option} {name!r} cannot be unpickled: {type(error).__name__}: {error}") from error


def name_of(option: str, given: Any) -> str:
    """Return the import path package.module:function of a function or class. An object that cannot be imported is held
    by this program (`held`): return its name there."""
    if not callable(given) and option != "sampler.environment.class":  # an environment may be an object
        raise CustomError(f"{option}: {type(given).__name__} is neither a function nor a class, nor can it be called")
    name, module = getattr(given, "__qualname__", None), getattr(given, "__module__", None)
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(module, str) or module == "__main__":
        return held.hold(given)
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is given else held.hold(given)


def check_options(option: str, maker: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options of a user's class or function to the types in its signature.

    A class takes all parameters of its constructor as options, a function only its keyword-only ones. Raises for
    unknown and missing options and for values of wrong types; the message names `option`.
    """
    import pydantic

    made = _unbound(maker)
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(maker).parameters.values()
        if inspect.isclass(made) or parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for name in options:
        if name not in parameters:
            from difflib import get_close_matches  # imported late: reward processes need it only for this message

            near = get_close_matches(name, parameters, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(parameters) or 'none'}"
            raise CustomError(f"{option}.{name}: {held.label_of(maker)} has no such option; {hint}")
    hints = typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in parameters.items()
    }
    model = pydantic.create_model(f"{held.label_of(maker)} options", **fields)
    try:
        checked = model.model_validate(dict(options))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (option, *first["loc"])))
        raise CustomError(f"{where}: {first['msg']}, not {first['input']!r}") from error
    return {name: getattr(checked, name) for name in options}


def _unbound(maker: Any) -> Any:
    """Return the function or class inside a partial."""
    while isinstance(maker, partial):
        maker = maker.func
    return maker


def make_custom_loss(name: str, options: Mapping[str, Any]) -> Any:
    """Load the user's code `name`, given for `loss.function`, and apply its checked options. Return an instance of a
    class, the result of a function without required arguments, or any other function with its options bound."""
    maker = load_custom("loss.function", name)
    made = _unbound(maker)
    if not inspect.isclass(made) and not inspect.isroutine(made):  # neither a class nor a function
        if options:
            raise CustomError("loss.options: loss.function is an object that is made already, and takes no options")
        return maker
    checked = check_options("loss.options", maker, options)
    takes = inspect.signature(maker).parameters.values()
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    if inspect.isclass(made) or not any(
        parameter.kind in positional and parameter.default is inspect.Parameter.empty for parameter in takes
    ):
        return maker(**checked)
    return partial(maker, **checked)
