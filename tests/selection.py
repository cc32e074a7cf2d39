"""What `make test` takes of a test that has many parameters; `make test-long` takes the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_except(values: Iterable[Any], *short: Any) -> list[Any]:
    """All of the values as parameters, marked `long` except for those that are named."""
    values = list(values)
    unknown = [value for value in short if value not in values]
    assert not unknown, f"no such parameters: {unknown}"
    return [value if value in short else _long(value) for value in values]


def _long(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
