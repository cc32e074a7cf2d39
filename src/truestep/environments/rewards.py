"""A reward is a Python function named by import path: `reward(prompt, completion, **fields) -> float`.

This file is read by the processes that call rewards, so it imports nothing that takes time.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from types import CoroutineType, TracebackType
from typing import Any

from truestep.custom import CustomError, load_custom
from truestep.errors import TruestepError
from truestep.text import printable

Reward = Callable[..., float]

_LONGEST_REASON = 2000  # as much of it as travels; what is shown is shorter


class RewardError(TruestepError):
    """The reason why a completion has no reward."""


def load_reward(name: str) -> Reward:
    """Import the reward that `package.module:function` names; the working directory is searched too."""
    try:
        return load_custom("reward", name)
    except CustomError as error:
        raise RewardError(str(error)) from error


# The first parameters of other trainers' rewards, and how theirs are called.
_OF_OTHERS = (
    (("completions",), "it has the signature of TRL, which rates lists of completions"),
    (("solution_str", "ground_truth"), "it has the signature of verl (data_source, solution_str, ground_truth)"),
    (("queries", "labels"), "it has the signature of OpenRLHF, which rates lists of queries"),
)
_OURS = "write it as reward(prompt, completion, *, answer, **_) -> float, for one completion and the prompt's fields"


def check_signature(name: str, reward: Reward, fields: Iterable[str] | None = None) -> None:
    """Refuse a reward that cannot be called with a prompt, a completion and a prompt's fields, if they are known."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # of some that are written in C
        return
    for names, how in _OF_OTHERS:
        if all(known in signature.parameters for known in names):
            raise RewardError(f"reward {name!r}: {how}; {_OURS}")
    try:
        if fields is None:
            signature.bind_partial("", "")
        else:
            signature.bind("", "", **dict.fromkeys(fields))
    except TypeError as error:
        given = "" if fields is None else f" (the first prompt's fields: {printable(', '.join(fields) or 'none', 60)})"
        raise RewardError(f"reward {name!r}: {printable(error, 100)}{given}; {_OURS}") from None


def call(reward: Reward, prompt: Any, completion: str, fields: Mapping[str, Any]) -> float:
    """Call a reward and make a number of what it returns. RewardError says what went wrong in the user's function,
    whatever it was: it may also have asked to exit, or return an object that breaks when it is looked at."""
    try:
        returned: Any = reward(prompt, completion, **fields)
        if type(returned) is CoroutineType:
            import asyncio  # late: few rewards need it

            returned = asyncio.run(returned)
    except BaseException as error:
        raise RewardError(f"the reward raised {_described(error)}{_place(error.__traceback__)}") from None
    if issubclass(type(returned), dict):  # isinstance would ask the object
        names = _shown(", ".join(map(str, returned)), str)
        raise RewardError(f"the reward returned a dict ({names}), which is not a number: return one, such as their sum")
    try:
        if isinstance(returned, str | bytes):  # float() would read some of them as numbers
            raise TypeError
        return float(returned)
    except BaseException:
        raise RewardError(f"the reward returned {_shown(returned, repr)}, which is not a number") from None


def _described(error: BaseException) -> str:
    message = _shown(error, str)
    name = _shown(type(error), lambda kind: kind.__name__)
    return f"{name}: {message}" if message else name


def _place(trace: TracebackType | None) -> str:
    """Name the line of the user's file that raised: the innermost one of the file that the reward itself is in."""
    inside = None if trace is None else trace.tb_next  # the first frame is ours
    if inside is None:
        return ""
    file, line = inside.tb_frame.f_code.co_filename, inside.tb_lineno
    while (inside := inside.tb_next) is not None:
        if inside.tb_frame.f_code.co_filename == file:
            line = inside.tb_lineno
    return f" (at {printable(os.path.basename(file), 80)}:{line})"


def _shown(value: Any, show: Callable[[Any], object]) -> str:
    """Show a user's object; its own methods may do anything."""
    try:
        return printable(show(value), _LONGEST_REASON)
    except BaseException:
        return "(an object that cannot be shown)"
