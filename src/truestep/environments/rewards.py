"""Loading and calling rewards: `reward(prompt, completion, **fields)` returns a number, or a dict of its parts.

Workers import this module, so it avoids slow imports.
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

_LONGEST_REASON = 2000  # characters sent to the run, which shows fewer
LONGEST_TRACEBACK = 2000  # characters kept from the end, where the error is
_MOST_PARTS = 64
_LONGEST_NAME = 100
TOTAL = "reward"  # name of the part that, if present, is the whole reward


class Rating(float):
    """A completion's reward, with its parts if the user's function returned any."""

    parts: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def of(cls, value: float, parts: Mapping[str, float]) -> "Rating":
        rating = cls(value)
        if parts:
            rating.parts = dict(parts)
        return rating


class RewardError(TruestepError):
    """An error that leaves a completion without a reward."""

    def __init__(self, message: str, traceback: str | None = None):
        """`traceback` is set if the user's function raised."""
        super().__init__(message)
        self.traceback = traceback


def load_reward(name: str) -> Reward:
    """Import a reward from `package.module:function`, searching the working directory too."""
    try:
        return load_custom("reward", name)
    except CustomError as error:
        raise RewardError(str(error)) from error


# Parameters that identify the reward signatures of other trainers, with the error message.
_OF_OTHERS = (
    (("completions",), "it has the signature of TRL, which rates lists of completions"),
    (("solution_str", "ground_truth"), "it has the signature of verl (data_source, solution_str, ground_truth)"),
    (("queries", "labels"), "it has the signature of OpenRLHF, which rates lists of queries"),
)
_OURS = "write it as reward(prompt, completion, *, answer, **_) -> float, for one completion and the prompt's fields"


def check_signature(name: str, reward: Reward, fields: Sequence[tuple[str, Sequence[str]]] | None = None) -> None:
    """Raise RewardError if a reward cannot be called with a prompt, a completion and the prompts' fields.

    `fields` has each set of field names with the place of a prompt that has it; None: unknown.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some functions written in C have no signature
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
    """Call a reward and return its result as a rating.

    Raises RewardError for any failure of the user's function, including SystemExit and returned objects whose methods
    raise.
    """
    try:
        returned: Any = reward(prompt, completion, **fields)
        if type(returned) is CoroutineType:
            import asyncio  # imported late: few rewards need it

            returned = asyncio.run(returned)
    except BaseException as error:
        raise failure(error, _behind_first(error.__traceback__)) from None  # the first frame is ours
    return rating_of(returned)


def _behind_first(trace: TracebackType | None) -> TracebackType | None:
    return None if trace is None else trace.tb_next


def failure(error: BaseException, inside: TracebackType | None, what: str = "the reward") -> RewardError:
    """Return the error for an exception of a user's code. `inside` is its traceback from the user's first frame on."""
    isolated = isinstance(error, OSError) and error.errno == errno.EROFS
    hint = "; an isolated reward writes to a /tmp of its own and to reward_writable alone" if isolated else ""
    reason = f"{what} raised {_described(error)}{_place(inside)}{hint}"
    return RewardError(reason, _traceback(error, inside))


def rating_of(returned: Any, what: str = "the reward", otherwise: str = "not a number") -> Rating:
    """Return the rating that a user's code returned as a number or as parts. `what` names that code in errors."""
    if issubclass(type(returned), dict):  # isinstance would call the object's __class__
        return _of_parts(returned, what)
    value = _number(returned)
    if value is None:
        raise RewardError(f"{what} returned {shown_value(returned)}, which is {otherwise}")
    return Rating(value)


def _of_parts(returned: Mapping[Any, Any], what: str) -> Rating:
    """Return the rating of a dict: the part `reward` if present (other parts are only logged), else the parts' sum."""
    names = shown_value(", ".join(map(str, returned)), str)
    if "score" in returned and TOTAL not in returned:
        raise RewardError(
            f"{what} returned a dict ({names}), as for verl, where score is the reward and the rest is noted: "
            "name it reward, or return the number alone"
        )
    if not 0 < len(returned) <= _MOST_PARTS:
        raise RewardError(f"{what} returned a dict of {len(returned)} parts: give 1 to {_MOST_PARTS}")
    parts: dict[str, float] = {}
    for name, given in returned.items():
        if type(name) is not str or not name.isprintable() or not name.strip() or len(name) > _LONGEST_NAME:
            raise RewardError(f"{what} returned a dict with the name {shown_value(name)}: a name is a short text")
        if given is None:  # an absent part
            continue
        value = _number(given)
        if value is None or not math.isfinite(value):
            raise RewardError(f"{what}'s part {name!r} is {shown_value(given)}, which is not a finite number")
        parts[name] = value
    if TOTAL in parts:
        return Rating.of(parts.pop(TOTAL), parts)
    if not parts:
        raise RewardError(f"{what} returned a dict ({names}) without a number in it")
    return Rating.of(math.fsum(parts.values()), parts)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)  # float() would parse texts
    except BaseException:
        return None


def _traceback(error: BaseException, inside: TracebackType | None) -> str | None:
    try:
        import traceback  # imported late: slow to import, and most rewards never raise

        lines = "".join(traceback.format_exception(type(error), error, inside)).splitlines()
    except BaseException:  # the exception's methods may raise, and the import may fail
        return None
    return "\n".join(printable(line, 300) for line in lines)[-LONGEST_TRACEBACK:]


def _described(error: BaseException) -> str:
    message = shown_value(error, str)
    name = shown_value(type(error), lambda kind: kind.__name__)
    return f"{name}: {message}" if message else name


def _place(inside: TracebackType | None) -> str:
    """Return the file and line of the error: the innermost frame in the file that defines the reward."""
    if inside is None:
        return ""
    file, line = inside.tb_frame.f_code.co_filename, inside.tb_lineno
    while (inside := inside.tb_next) is not None:
        if inside.tb_frame.f_code.co_filename == file:
            line = inside.tb_lineno
    return f" (at {printable(os.path.basename(file), 80)}:{line})"


def shown_value(value: Any, show: Callable[[Any], object] = repr) -> str:
    """Return a printable form of a user's object, whose methods may raise anything."""
    try:
        return printable(show(value), _LONGEST_REASON)
    except BaseException:
        return "(an object that cannot be shown)"
