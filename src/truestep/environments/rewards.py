"""A reward is a Python callable named by import path: `reward(prompt, completion, **fields) -> float`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.errors import TruestepError
from truestep.types import LARGEST_REWARD

Reward = Callable[..., float]


class RewardError(TruestepError):
    pass


def load_reward(name: str) -> Reward:
    """`package.module:function`; the working directory is searched too."""
    module_name, separator, function_name = name.partition(":")
    if not separator or not module_name or not function_name:
        raise RewardError(f"reward {name!r}: write it as package.module:function")
    # A console script does not have the working directory on its path; `python -m` does.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(f"reward {name!r}: {error}") from error
    except (Exception, SystemExit) as error:  # the module is the user's: importing it can raise anything
        raise RewardError(f"reward {name!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    reward = getattr(module, function_name, None)
    if not callable(reward):
        raise RewardError(f"reward {name!r}: {module_name} has no function {function_name}")
    return reward


def rate(reward: Reward, prompt: Prompt, completion: str) -> float:
    """The reward of one completion; RewardError says what went wrong in the user's function."""
    try:
        given: Any = reward(prompt.prompt, completion, **prompt.fields)
    except Exception as error:
        raise RewardError(f"the reward raised {type(error).__name__}: {error}") from error
    try:
        if isinstance(given, str | bytes):  # float() would read some of them as numbers
            raise TypeError
        value = float(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"the reward returned {given!r}, which is no number") from error
    if not abs(value) <= LARGEST_REWARD:
        raise RewardError(f"the reward returned {value}; at most {LARGEST_REWARD:g} in size is a reward")
    return value
