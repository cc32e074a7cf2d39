"""Rewards for tests that send an object to workers: these import this module to make it, so it imports little."""

from __future__ import annotations

from typing import Any


def scaled(prompt: object, completion: str, *, scale: float, **_: object) -> float:
    return scale * len(completion)


class Counting:
    def __init__(self) -> None:
        self.calls = 0
        self.lock: Any = None

    def __call__(self, prompt: object, completion: str, **_: object) -> float:
        self.calls += 1
        return float(len(completion))

    def method(self, prompt: object, completion: str, **_: object) -> float:
        return self(prompt, completion)
