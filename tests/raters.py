"""Reward services for tests of what uses them: they rate at once, in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from truestep.environments.process import fit
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, Reward, RewardError, call


def completed(make: Callable[[], Rating]) -> Future[Rating]:
    future: Future[Rating] = Future()
    try:
        future.set_result(fit(make()))
    except RewardError as error:
        future.set_exception(error)
    return future


class DirectRater:
    """Calls a function as a worker would."""

    def __init__(self, reward: Reward):
        self._reward = reward
        self.closed = False

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[Rating]:
        return completed(lambda: call(self._reward, prompt.prompt, completion, prompt.fields))

    def close(self) -> None:
        self.closed = True


class NumberedRater(DirectRater):
    """Rates by a completion's group and its number in it, whatever stands in it and in whatever order it comes."""

    def submit(self, prompt: Prompt, completion: str, seed: str) -> Future[Rating]:
        numbers: list[Any] = [int(word) for word in seed.split()[-2:]]
        return completed(lambda: call(self._reward, *numbers, {}))
