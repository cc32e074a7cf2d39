"""Checks of compiled kernels on this machine before their first use. Without them, a wrong result of the compiler would
go unnoticed."""

import logging
import threading
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

log = logging.getLogger(__name__)

Question = TypeVar("Question", bound=Callable[..., Any])


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


def once(ask: Question) -> Question:
    """Keep the answers of a function. A thread that asks while another computes the answer waits for it."""
    lock, kept = threading.Lock(), cache(ask)

    @wraps(ask)
    def answer(*given: Any) -> Any:
        with lock:
            return kept(*given)

    return cast(Question, answer)


def ask_beside(place: torch.device, questions: Iterable[Callable[[], object]]) -> None:
    """Call functions made by `once` in threads, one each. Compilers of kernels are programs of their own and C++, so
    several work at a time, and beside the caller."""

    def ask(question: Callable[[], object]) -> None:
        with torch.cuda.device(place):
            question()

    for question in questions:
        threading.Thread(target=ask, args=(question,), name="self-test").start()
