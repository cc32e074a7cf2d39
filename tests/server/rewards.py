"""Rewards for tests, by import path: they run in other processes."""

from __future__ import annotations


def word_reward(prompt: object, completion: str, **_: object) -> float:
    """Differs between most completions."""
    return len(set(completion.split())) / 10
