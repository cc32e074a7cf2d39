"""Checks of compiled kernels on this machine before their first use: a compiler's error would be silent."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def serves(what: str, instead: str, check: Callable[[], str | None]) -> bool:
    """Run a check, which returns a problem or None. Return True if there is none; otherwise log the problem and what is
    used instead."""
    try:
        problem = check()
    except Exception as error:  # errors of compilers have no common type
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning("%s does not work on this machine, %s: %s", what, instead, problem)
    return not problem
