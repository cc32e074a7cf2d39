"""Code that a compiler makes for this machine is tried on it before it is used: a compiler's error would be silent."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def serves(what: str, instead: str, check: Callable[[], str | None]) -> bool:
    """Tell whether a check names no problem. If it does, or fails, the log says what is used instead."""
    try:
        problem = check()
    except Exception as error:  # a compiler's errors have no common type
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning("%s does not work on this machine, %s: %s", what, instead, problem)
    return not problem
