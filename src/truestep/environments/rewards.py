"""A reward is a Python function named by import path: `reward(prompt, completion, **fields)` gives a number, or a dict
of its parts.

This file is read by the processes that call rewards, so it imports nothing that takes time.
"""

import errno
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType, MappingProxyType, TracebackType
from typing import Any

from truestep.config.custom import CustomError, load_custom
from truestep.errors import TruestepError
from truestep.text import printable

Reward = Callable[..., float | Mapping[str, float]]

_LONGEST_REASON = 2000  # as much of it as travels; what is shown is shorter
LONGEST_TRACEBACK = 2000  # characters of it that are kept: its end, where the error is
_MOST_PARTS = 64
_LONGEST_NAME = 100
TOTAL = "reward"  # the part that is the whole reward, where there is one of this name


class Rating(float):
    """A completion's reward, with the parts that it was made of where the user's function gave them."""

    parts: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def of(cls, value: float, parts: Mapping[str, float]) -> "Rating":
        rating = cls(value)
        if parts:
            rating.parts = dict(parts)
        return rating


class RewardError(TruestepError):
    """The reason why a completion has no reward."""

    def __init__(self, message: str, traceback: str | None = None):
        """Take the reason, and the traceback where the user's function raised."""
        super().__init__(message)
        self.traceback = traceback


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


def check_signature(name: str, reward: Reward, fields: Sequence[tuple[str, Sequence[str]]] | None = None) -> None:
    """Refuse a reward that cannot be called with a prompt, a completion and a prompt's fields, if they are known: each
    set of names with the place of a prompt that has it."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # of some that are written in C
        return
    for names, how in _OF_OTHERS:
        if all(known in signature.parameters for known in names):
            raise RewardError(f"reward {name!r}: {how}; {_OURS}")
    sets: Sequence[tuple[str, Sequence[str] | None]] = fields or [("", None)]
    for place, given in sets:
        try:
            if given is None:
                signature.bind_partial("", "")
            else:
                signature.bind("", "", **dict.fromkeys(given))
        except TypeError as error:
            known = ", ".join(given or ()) or "none"
            where = "" if given is None else f" (the fields of {printable(place, 200)}: {printable(known, 60)})"
            raise RewardError(f"reward {name!r}: {printable(error, 100)}{where}; {_OURS}") from None


def call(reward: Reward, prompt: Any, completion: str, fields: Mapping[str, Any]) -> Rating:
    """Call a reward and make a rating of what it returns. RewardError says what went wrong in the user's function,
    whatever it was: it may also have asked to exit, or return an object that breaks when it is looked at."""
    try:
        returned: Any = reward(prompt, completion, **fields)
        if type(returned) is CoroutineType:
            import asyncio  # late: few rewards need it

            returned = asyncio.run(returned)
    except BaseException as error:
        isolated = isinstance(error, OSError) and error.errno == errno.EROFS
        hint = "; an isolated reward writes to a /tmp of its own and to reward_writable alone" if isolated else ""
        reason = f"the reward raised {_described(error)}{_place(error.__traceback__)}{hint}"
        raise RewardError(reason, _traceback(error)) from None
    if issubclass(type(returned), dict):  # isinstance would ask the object
        return _of_parts(returned)
    value = _number(returned)
    if value is None:
        raise RewardError(f"the reward returned {_shown(returned, repr)}, which is not a number")
    return Rating(value)


def _of_parts(returned: Mapping[Any, Any]) -> Rating:
    """Make a rating of a dict: its part `reward` is the reward and the others are only noted; without it, their sum."""
    names = _shown(", ".join(map(str, returned)), str)
    if "score" in returned and TOTAL not in returned:
        raise RewardError(
            f"the reward returned a dict ({names}), as for verl, where score is the reward and the rest is noted: "
            "name it reward, or return the number alone"
        )
    if not 0 < len(returned) <= _MOST_PARTS:
        raise RewardError(f"the reward returned a dict of {len(returned)} parts: give 1 to {_MOST_PARTS}")
    parts: dict[str, float] = {}
    for name, given in returned.items():
        if type(name) is not str or not name.isprintable() or not name.strip() or len(name) > _LONGEST_NAME:
            raise RewardError(f"the reward returned a dict with the name {_shown(name, repr)}: a name is a short text")
        if given is None:  # a part that this completion does not have
            continue
        value = _number(given)
        if value is None or not math.isfinite(value):
            raise RewardError(f"the reward's part {name!r} is {_shown(given, repr)}, which is not a finite number")
        parts[name] = value
    if TOTAL in parts:
        return Rating.of(parts.pop(TOTAL), parts)
    if not parts:
        raise RewardError(f"the reward returned a dict ({names}) without a number in it")
    return Rating.of(math.fsum(parts.values()), parts)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)  # float() would read some of them as numbers
    except BaseException:
        return None


def _traceback(error: BaseException) -> str | None:
    """Word the traceback of the user's function, from its own first line on."""
    try:
        import traceback  # late: it takes longer to import than all else here, and most rewards never raise

        inside = None if error.__traceback__ is None else error.__traceback__.tb_next  # the first frame is ours
        lines = "".join(traceback.format_exception(type(error), error, inside)).splitlines()
    except BaseException:  # its own methods may do anything, and no file may be left to import from
        return None
    return "\n".join(printable(line, 300) for line in lines)[-LONGEST_TRACEBACK:]


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
