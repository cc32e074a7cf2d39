"""What `make test` takes of a test that has many parameters, and what the other suites take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_except(values: Iterable[Any], *short: Any) -> list[Any]:
    """All of the values as parameters, marked `long` except for those that are named."""
    values = list(values)
    return in_tiers(values, short, [value for value in values if value not in short])


def nightly_except(values: Iterable[Any], *short: Any) -> list[Any]:
    """All of the values as parameters, marked `nightly` except for those that are named."""
    return [value if value in short else _marked(value, pytest.mark.nightly) for value in _known(values, short)]


def in_tiers(values: Iterable[Any], short: Iterable[Any], long: Iterable[Any], tier: str = "long") -> list[Any]:
    """All of the values as parameters: those of `long` are marked so, or for another tier, and what is in neither is
    marked `release`."""
    short, long = list(short), list(long)

    def mark(value: Any) -> pytest.MarkDecorator:
        return getattr(pytest.mark, tier) if value in long else pytest.mark.release

    return [value if value in short else _marked(value, mark(value)) for value in _known(values, [*short, *long])]


def _known(values: Iterable[Any], named: Iterable[Any]) -> list[Any]:
    values = list(values)
    unknown = [value for value in named if value not in values]
    assert not unknown, f"no such parameters: {unknown}"
    return values


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
