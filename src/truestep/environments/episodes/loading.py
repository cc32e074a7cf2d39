"""Loading a user's environment: a class, a class with some of its options bound, or an object. Imports no torch."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from truestep.config.custom import CustomError, load_custom
from truestep.environments.episodes.environment import Environment

Kind = type[Environment] | Environment  # if it is an object, each episode gets a copy


class UnusableError(Exception):
    """The environment cannot be used; the message says why."""


def load_environment(name: str, given: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """Import an environment, and return it with its options."""
    try:
        kind = load_custom("environment", name)
    except CustomError as error:
        raise UnusableError(str(error)) from error
    options = dict(given)
    while isinstance(kind, partial) and not kind.args:
        options = kind.keywords | options
        kind = kind.func
    if isinstance(kind, Environment):
        if options:
            raise UnusableError(f"environment {name!r}: it is an object, not a class, and takes no options")
        return kind, options
    if not inspect.isclass(kind) or not issubclass(kind, Environment):
        raise UnusableError(f"environment {name!r}: it is not a subclass of truestep's Environment")
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise UnusableError(f"environment {name!r}: its options do not fit: {error}") from error
    return kind, options


def prepared(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare an environment for its episodes, and return the schemas of its tools by name."""
    try:
        return dict(kind.prepare(options))
    except CustomError as error:
        raise UnusableError(str(error)) from error
    except Exception as error:  # type annotations of a user's tools may be anything
        name = (kind if inspect.isclass(kind) else type(kind)).__name__
        raise UnusableError(f"{name}.prepare raised {type(error).__name__}: {error}") from error
