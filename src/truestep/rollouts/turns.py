"""The turns of a record: the spans of its tokens that the policy wrote, and the spans that answer them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from truestep.rollouts import values
from truestep.rollouts.values import BadRecord, checked, describe, plain
from truestep.types import Turn

_LONGEST_ROLE = 64  # characters
_MOST = 65536  # turns of a record


def read_turns(given: Sequence[Any] | np.ndarray | None, num_tokens: int) -> tuple[Turn, ...] | None:
    """Check a record's turns: in order, without overlap. Example: `[{"start": 3, "end": 9, "role": "assistant"}]`."""
    if given is None:
        return None
    if len(given) > _MOST:
        raise BadRecord(f"turns has {len(given)} values: expected at most {_MOST}")
    turns: list[Turn] = []
    for index, one in enumerate(given):
        name = f"turns[{index}]"
        one = plain(one, name)
        if not isinstance(one, Mapping):
            raise BadRecord(f"{name} is {describe(one)}: expected an object with start, end and role")
        start, end = (checked(values.integer, plain(one.get(key), name), f"{name}.{key}") for key in ("start", "end"))
        before = turns[-1].end if turns else 0
        if not before <= start < end <= num_tokens:
            raise BadRecord(
                f"{name} is {start} to {end}: expected a span that begins at {before} or later and ends by {num_tokens}"
            )
        role, reward = plain(one.get("role"), name), plain(one.get("reward"), name)
        if not isinstance(role, str) or not role.isprintable() or not 0 < len(role) <= _LONGEST_ROLE:
            raise BadRecord(f"{name}.role is {describe(role)}: expected a short text")
        turns.append(
            Turn(start, end, role, None if reward is None else checked(values.reward, reward, f"{name}.reward"))
        )
    return tuple(turns)


def turn_lines(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return turns as JSON values, in the form of a record."""
    return [{name: value for name, value in asdict(turn).items() if value is not None} for turn in turns]
