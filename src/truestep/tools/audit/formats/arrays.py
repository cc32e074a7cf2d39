"""Converts lists in foreign records to arrays. Lists of a wrong length are noted as misfits; other invalid values raise
`UnreadableError`."""

import math
from typing import Any

import numpy as np

from truestep.text import printable
from truestep.tools.audit.opening import UnreadableError

MOST = 2**27  # values of one list


def array(value: Any, what: str, dtype: Any = np.float64) -> np.ndarray | None:
    """Convert a list of numbers, an array or a tensor to a one-dimensional array. Null values become NaN."""
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach()
        if value.numel() > MOST:
            raise UnreadableError(f"{what} has {value.numel():,} values: at most {MOST:,} are read")
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if kinds - {int, float, bool, type(None), np.float64, np.float32, np.int64, np.int32}:
            wrong = next(iter(kinds - {int, float, bool, type(None)}))
            raise UnreadableError(f"{what} holds a value of type {printable(wrong.__name__, 40)}: expected numbers")
        if type(None) in kinds:
            value = [np.nan if item is None else item for item in value]
    elif not isinstance(value, np.ndarray):
        raise UnreadableError(f"{what} is of type {printable(type(value).__name__, 40)}: expected a list of numbers")
    try:
        found = np.asarray(value, dtype=np.float64 if dtype is np.float64 else None)
        if found.dtype.kind == "f" and dtype is not np.float64 and not np.isfinite(found).all():
            raise ValueError("a value is missing")
        found = found.astype(dtype)
    except (ValueError, OverflowError, TypeError) as error:
        raise UnreadableError(f"{what} cannot be read as numbers: {printable(error)}") from None
    if found.ndim != 1:
        raise UnreadableError(f"{what} has {found.ndim} dimensions: expected one")
    return found


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if hasattr(value, "item"):
        value = value.item() if getattr(value, "size", 1) == 1 or getattr(value, "ndim", 1) == 0 else None
    if isinstance(value, bool | int | float) and abs(value) < 1e300:
        return float(value)
    return None


def score(value: Any) -> float | None:
    """Return a number that may be NaN, which stands for infinity as well; None for anything else."""
    if hasattr(value, "item"):
        value = value.item() if getattr(value, "size", 1) == 1 or getattr(value, "ndim", 1) == 0 else None
    return math.nan if isinstance(value, float) and not math.isfinite(value) else number(value)


def whole(value: Any) -> int | None:
    """Return a 64-bit integer, also if it is written as text; None for anything else."""
    if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 19:
        value = int(value)
    found = number(value)
    return None if found is None or found != int(found) or abs(found) >= 2**62 else int(found)


def text(value: Any) -> str | None:
    """Return a string, the texts of messages, or a number as text; None for anything else."""
    if isinstance(value, list):
        parts = [item.get("content") for item in value if isinstance(item, dict)]
        return "\n".join(part for part in parts if isinstance(part, str)) or None
    if isinstance(value, str):
        return value
    return None if value is None or isinstance(value, dict | bool) else str(value)[:1000]


class Fit:
    """Aligns lists with a sample's tokens, and notes lists of a wrong length."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.misfits: list[tuple[str, int, int]] = []

    def whole(self, values: np.ndarray | None, name: str) -> np.ndarray | None:
        """Return values of all tokens. If the length is wrong, return None and note a misfit."""
        return self._checked(values, name, self.tokens)

    def tail(self, values: np.ndarray | None, name: str, count: int, missing: Any = np.nan) -> np.ndarray | None:
        """Return values for all tokens, given those of the last `count` tokens; the others are `missing`."""
        if (values := self._checked(values, name, count)) is None:
            return None
        return np.concatenate([np.full(self.tokens - count, missing, values.dtype), values])

    def at(self, values: np.ndarray | None, name: str, mask: np.ndarray | None) -> np.ndarray | None:
        """Return values for all tokens, given those of all tokens or of the labels only."""
        if values is None or mask is None or len(values) == self.tokens or len(values) != mask.sum():
            return self.whole(values, name)
        spread = np.full(self.tokens, np.nan)
        spread[mask] = values
        return spread

    def _checked(self, values: np.ndarray | None, name: str, wanted: int) -> np.ndarray | None:
        if values is None:
            return None
        if len(values) != wanted:
            self.misfits.append((name, len(values), wanted))
            return None
        return values
