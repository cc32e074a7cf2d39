"""The largest of three numbers, the task of docs/tutorial.md, as recipe_beside_trl.py and TRL's process take it."""

from __future__ import annotations

import random


def right(completion: str, answer: str) -> float:
    """1 if the first line of the completion is the answer, else 0."""
    return 1.0 if completion.split("\n")[0].strip() == answer else 0.0


def reward(prompt: str, completion: str, *, answer: str, **_: object) -> float:
    return right(completion, answer)


def rows(count: int) -> list[dict[str, str]]:
    """Make different prompts, each with its answer."""
    source = random.Random(0)
    asked: dict[tuple[int, ...], None] = {}
    while len(asked) < count:
        asked[tuple(source.sample(range(10, 100), 3))] = None
    return [
        {"prompt": f"largest of 31 12 27: 31\nlargest of {a} {b} {c}:", "answer": str(max(a, b, c))}
        for a, b, c in asked
    ]
