"""A reward is a Python callable named by import path: `reward(prompt, completion, **fields) -> float`."""

from collections.abc import Callable
from typing import Any

from truestep.custom import CustomError, load_custom
from truestep.environments.prompts import Prompt
from truestep.errors import TruestepError
from truestep.types import LARGEST_REWARD

Reward = Callable[..., float]


class RewardError(TruestepError):
    pass


def load_reward(name: str) -> Reward:
    """Import the reward that `package.module:function` names; the working directory is searched too."""
    try:
        return load_custom("reward", name)
    except CustomError as error:
        raise RewardError(str(error)) from error


def rate(reward: Reward, prompt: Prompt, completion: str) -> float:
    """Rate one completion. RewardError says what went wrong in the user's function."""
    try:
        returned: Any = reward(prompt.prompt, completion, **prompt.fields)
    except Exception as error:
        raise RewardError(f"the reward raised {type(error).__name__}: {error}") from error
    try:
        if isinstance(returned, str | bytes):  # float() would read some of them as numbers
            raise TypeError
        value = float(returned)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"the reward returned {returned!r}, which is not a number") from error
    if not abs(value) <= LARGEST_REWARD:
        raise RewardError(f"the reward returned {value}; at most {LARGEST_REWARD:g} in size is a reward")
    return value
