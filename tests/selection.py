"""What `make test` takes of a test that has many parameters, what `make test-long`, and what `make test-release`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_except(values: Iterable[Any], *short: Any) -> list[Any]:
    """All of the values as parameters, marked `long` except for those that are named."""
    values = list(values)
    return in_tiers(values, short, [value for value in values if value not in short])


def in_tiers(values: Iterable[Any], short: Iterable[Any], long: Iterable[Any]) -> list[Any]:
    """All of the values as parameters: those of `long` are marked so, and what is in neither is marked `release`."""
    values, short, long = list(values), list(short), list(long)
    unknown = [value for value in (*short, *long) if value not in values]
    assert not unknown, f"no such parameters: {unknown}"

    def marked(value: Any) -> Any:
        given = value if isinstance(value, tuple) else (value,)
        return pytest.param(*given, marks=pytest.mark.long if value in long else pytest.mark.release)

    return [value if value in short else marked(value) for value in values]
