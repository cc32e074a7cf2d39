"""A reward that draws from Python's random state and sometimes raises: both must come back after a restart."""

from __future__ import annotations

import random


def reward(prompt: str, completion: str, **_: object) -> float:
    if len(completion) % 7 == 3:
        raise ValueError("this completion cannot be rated")
    return len(completion) / 10 + random.random()
