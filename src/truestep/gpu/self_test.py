"""Checks compiled kernels on this machine before their first use, because a compiler may produce wrong code."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def serves(what: str, instead: str, check: Callable[[], str | None]) -> bool:
    """Run a check, which returns a problem or None. Return True if there is no problem; otherwise log the problem and
    say what is used instead."""
    try:
        problem = check()
    except Exception as error:  # errors of compilers have no common type
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning("%s does not work on this machine, %s: %s", what, instead, problem)
    return not problem
