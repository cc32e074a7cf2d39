"""Rewards for tests, by import path: they run in processes of their own."""

from __future__ import annotations

import os
import time


def word_reward(prompt: object, completion: str, **_: object) -> float:
    """Differs between most completions."""
    return len(set(completion.split())) / 10


def difficult_reward(prompt: object, completion: str, **_: object) -> float:
    """Some completions hang it, some end its process, some raise."""
    words = completion.split()
    if len(words) % 11 == 3:
        time.sleep(600)
    if len(words) % 11 == 4:
        os._exit(7)
    if len(words) % 11 == 5:
        raise ValueError("five words are too many to rate")
    return len(set(words)) / 10


def process_id(prompt: object, completion: str, **_: object) -> float:
    return float(os.getpid())


def choosy(prompt: object, completion: str, **_: object) -> object:
    """By what it is asked to rate."""
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os._exit(7)
    if completion == "raise":
        raise ValueError("no such answer")
    return "1.0" if completion == "text" else len(completion)
