"""Checks of a record's untrusted values: numbers, lists of numbers, text.

Each `Check` has two forms: `single` checks one value and raises the error, and `accepts` checks an array and returns
booleans. A list is checked as an array first, and value by value only if the array check fails.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from truestep.types import LARGEST_REWARD

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # smaller float32 values lose precision or round to 0
LARGEST_INT64 = 2**63 - 1
LARGEST_EXPERT = 2**16 - 1

_PLAIN = frozenset({type(None), bool, int, float, str, list, dict})  # types that a JSON parser returns


class BadRecord(Exception):  # noqa: N818 - the record is bad, the program is not
    """A record that cannot be trained on. Its ids are set if they could be read, and `num_sequences` too."""

    def __init__(
        self,
        reason: str,
        *,
        id: str | None = None,
        group_id: str | None = None,
        document_id: str | None = None,
        num_sequences: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.id = id
        self.group_id = group_id
        self.document_id = document_id
        self.num_sequences = num_sequences


class UnfitError(Exception):
    """A value that fails a check. The argument says what was expected; the caller adds the field's name."""


def plain(value: Any, field: str) -> Any:
    """Convert numpy, pyarrow and tensor values to Python values; return other values unchanged."""
    if type(value) in _PLAIN:
        return value
    for method in ("as_py", "to_pylist", "tolist"):
        convert = getattr(value, method, None)
        if callable(convert):
            try:
                return convert()
            except Exception as error:  # a foreign object can raise anything; only this record is rejected
                raise BadRecord(f"{field} cannot be read: {describe(str(error))}") from None
    return value


def describe(value: Any) -> str:
    """Return a short, one-line description of a value for a message. Never raises, even for ints of 5000 digits."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        bits = int.bit_length(value)
        return int.__repr__(value) if bits <= 64 else f"an integer of {bits} bits"
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str):
        return ascii(str(value)) if len(value) <= 40 else f"{str(value[:40])!a}..."
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, Mapping) else f"of type {type(value).__name__}"


def integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnfitError("expected an integer")
    if not -LARGEST_INT64 <= value <= LARGEST_INT64:
        raise UnfitError("beyond 64 bits")
    return int(value)


def at_least_one(value: Any) -> int:
    count = integer(value)
    if count < 1:
        raise UnfitError("expected at least 1")
    return count


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnfitError("expected a number")
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise UnfitError("expected a finite number")
    if abs(number) > LARGEST_FLOAT32:
        raise UnfitError("not finite in float32")
    return number


def _logprob(value: Any) -> float:
    logprob = _number(value)
    if logprob > 0:
        raise UnfitError("a log-probability is at most 0")
    return logprob


def _zero_or_one(value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise UnfitError("expected 0 or 1")
    return bool(value)


def true_or_false(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UnfitError("expected true or false")
    return value


def _count(value: Any) -> int:
    count = integer(value)
    if count < 0:
        raise UnfitError("expected at least 0")
    return count


def _expert(value: Any) -> int:
    number = integer(value)
    if not 0 <= number <= LARGEST_EXPERT:
        raise UnfitError(f"an expert's number is 0 to {LARGEST_EXPERT:,}")
    return number


def reward(value: Any) -> float:
    number = _number(value)
    if abs(number) > LARGEST_REWARD:
        raise UnfitError(f"at most {LARGEST_REWARD:g} in size, for advantages in float32")
    return number


def temperature(value: Any) -> float:
    number = _number(value)
    if number <= 0:
        raise UnfitError("a temperature is above 0")
    if number < SMALLEST_TEMPERATURE:
        raise UnfitError("too small for float32, and the logits are divided by it")
    return number


@dataclass(frozen=True)
class Check:
    single: Callable[[Any], Any]
    types: frozenset[type]  # Python types that an array of dtype `wide` holds exactly
    wide: type[np.generic]  # dtype of the array given to `accepts`
    # True only for values that `single` accepts; may be false for some of these.
    accepts: Callable[[np.ndarray], np.ndarray]
    stored: type[np.generic]  # dtype of the checked array


INTEGER = frozenset({int})
NUMBER = frozenset({int, float})

zero_or_one = Check(_zero_or_one, frozenset({int, bool}), np.int64, lambda a: (a == 0) | (a == 1), np.bool_)
logprob = Check(_logprob, NUMBER, np.float64, lambda a: (a <= 0) & (a >= -LARGEST_FLOAT32), np.float32)
advantage = Check(_number, NUMBER, np.float64, lambda a: np.abs(a) <= LARGEST_FLOAT32, np.float32)
whole_number = Check(integer, INTEGER, np.int64, lambda a: a >= -LARGEST_INT64, np.int64)
expert = Check(_expert, INTEGER, np.int64, lambda a: (a >= 0) & (a <= LARGEST_EXPERT), np.uint16)
version = Check(_count, INTEGER, np.int64, lambda a: a >= 0, np.int64)


def token_id(vocabulary_size: int | None) -> Check:
    largest = LARGEST_INT64 if vocabulary_size is None else vocabulary_size - 1

    def check(value: Any) -> int:
        token = integer(value)
        if token < 0:
            raise UnfitError("a token id is at least 0")
        if token > largest:
            raise UnfitError(f"outside the vocabulary of {vocabulary_size} tokens")
        return token

    return Check(check, INTEGER, np.int64, lambda a: (a >= 0) & (a <= largest), np.int64)


def checked(check: Callable[[Any], Any], value: Any, name: str, place: str = "") -> Any:
    """Check a single value and return it. Error messages have `name` (field and index) before the value, `place` after
    it."""
    value = plain(value, name)
    try:
        return check(value)
    except UnfitError as expected:
        raise BadRecord(f"{name} is {describe(value)}{place}: {expected}") from None


def checked_array(
    check: Check,
    values: Sequence[Any] | np.ndarray,
    field: str,
    indices: Sequence[int] | None = None,
    place: str = "",
) -> np.ndarray:
    """Check the values and return them as an array. `indices` gives each value's index in the record's list."""
    types = {type(values.item(0))} if isinstance(values, np.ndarray) and len(values) else set(map(type, values))
    if types <= check.types:
        try:
            array = np.asarray(values, dtype=check.wide)
        except OverflowError:  # an integer is too large for the array; the loop below reports which one
            array = None
        if array is not None and check.accepts(array).all():
            return array.astype(check.stored)
    places = zip(range(len(values)) if indices is None else indices, values, strict=True)
    accepted = [checked(check.single, value, f"{field}[{index}]", place) for index, value in places]
    return np.array(accepted, dtype=check.stored)
