"""Checks of the values that an environment's methods return. The episode's process checks them, and the run checks them
again."""

import json
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from truestep.environments.episodes.environment import End
from truestep.environments.episodes.wire import LARGEST_ANSWER
from truestep.environments.rewards import RewardError, rating_of, shown_value

_LARGEST = LARGEST_ANSWER - 2**16  # the most bytes of an environment's message, as JSON
_LARGEST_TOKEN = 2**31 - 1
# Bound at import, before a user's code can replace the functions of `json`.
_dumps = json.dumps


def is_said(value: Any) -> bool:
    """Tell whether a returned value is a message to the policy. Otherwise it ends the episode."""
    return issubclass(type(value), str | list | tuple)


def said_of(value: Any, what: str) -> dict[str, Any]:
    """Convert a returned `value` to {"text": ...}, {"messages": ...} or {"tokens": ...}. `what` names the method in
    errors, such as "the environment's step". Raises RewardError if the value is none of these, or JSON cannot hold it.
    """
    try:
        said = _said_of(value, what)
        _dumps(said, ensure_ascii=False).encode()  # fails on lone surrogates, which tokenizers do not accept
        size = len(_dumps(said, allow_nan=False))
    except RewardError:
        raise
    except UnicodeEncodeError as error:
        raise RewardError(f"{what} returned a text that is not Unicode: {shown_value(error, str)}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(f"{what} returned what JSON cannot hold: {shown_value(error, str)}") from None
    except BaseException:  # a user's object may raise anything
        raise RewardError(f"{what} returned an object that cannot be read") from None
    if size > _LARGEST:
        raise RewardError(f"{what} returned {size} bytes; at most {_LARGEST} are allowed")
    return said


def _said_of(value: Any, what: str) -> dict[str, Any]:
    if issubclass(type(value), str):
        if not value:
            raise RewardError(f"{what} returned an empty text")
        return {"text": str(value)}
    if not issubclass(type(value), list | tuple):
        raise RewardError(f"{what} returned {shown_value(value)}, which is neither messages, text nor tokens")
    if not value:
        raise RewardError(f"{what} returned an empty list")
    if all(issubclass(type(one), Integral) and type(one) is not bool for one in value):
        return {"tokens": [_token(one, what) for one in value]}
    for one in value:
        problem = _problem_of_message(one)
        if problem is not None:
            raise RewardError(f"{what} returned a list with {shown_value(one)}, {problem}")
    return {"messages": [dict(one) for one in value]}


def _token(value: Any, what: str) -> int:
    if not 0 <= value <= _LARGEST_TOKEN:
        raise RewardError(f"{what} returned {shown_value(value)}, which is no token")
    return int(value)


def _problem_of_message(one: Any) -> str | None:
    if not issubclass(type(one), dict):
        return "which is neither a message nor a token"
    role, content = one.get("role"), one.get("content")
    if type(role) is not str or not role:
        return "a message without a role"
    if not issubclass(type(content), str | list) and not (content is None and one.get("tool_calls")):
        return "a message without content"
    return None


def end_of(value: Any, what: str, turns: int) -> dict[str, Any]:
    """Return the end of an episode as JSON: {"reward": ..., "parts": ..., "turn_rewards": ...}."""
    reward, of_turns = (value.reward, value.turn_rewards) if issubclass(type(value), End) else (value, ())
    if issubclass(type(reward), dict) and "role" in reward:
        raise RewardError(f"{what} returned a message, which belongs in a list: [message]")
    rating = rating_of(reward, what, "neither messages, text, tokens, an End nor a reward")
    rewards = turn_rewards_of(of_turns, what, turns)
    return {"reward": float(rating), "parts": dict(rating.parts), "turn_rewards": rewards}


def turn_rewards_of(value: Any, what: str, turns: int) -> list[float | None]:
    """Return the rewards of turns. Raises RewardError if there are more rewards than turns, or if one is not a
    number."""
    found: list[float | None] = []
    if not issubclass(type(value), list | tuple):
        raise RewardError(f"{what} returned turn_rewards that are no list: {shown_value(value)}")
    for one in value:
        number = None if one is None else float(rating_of(one, f"{what}, in turn_rewards,"))
        if number is not None and not math.isfinite(number):
            raise RewardError(f"{what} returned turn_rewards with {number}, which is not a finite number")
        found.append(number)
    if len(found) > turns:
        raise RewardError(f"{what} returned {len(found)} turn_rewards after {turns} turns of the policy")
    return found


def parts_of(value: Any) -> Mapping[str, float]:
    """Return the parts of a reward in an answer. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError("parts that are no dict")
    if not all(isinstance(part, float) and name.isprintable() for name, part in value.items()):
        raise ValueError("a part that is not a number")
    return value
