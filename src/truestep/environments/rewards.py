"""A reward is a Python function named by import path: `reward(prompt, completion, **fields) -> float`.

This file is read by the processes that call rewards, so it imports nothing that takes time.
"""

from collections.abc import Callable, Mapping
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


def call(reward: Reward, prompt: Any, completion: str, fields: Mapping[str, Any]) -> float:
    """Call a reward and make a number of what it returns. RewardError says what went wrong in the user's function,
    whatever it was: it may also have asked to exit, or return an object that breaks when it is looked at."""
    try:
        returned: Any = reward(prompt, completion, **fields)
    except BaseException as error:
        raise RewardError(f"the reward raised {_described(error)}") from None
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


def _shown(value: Any, show: Callable[[Any], object]) -> str:
    """Show a user's object; its own methods may do anything."""
    try:
        return printable(show(value), _LONGEST_REASON)
    except BaseException:
        return "(an object that cannot be shown)"
