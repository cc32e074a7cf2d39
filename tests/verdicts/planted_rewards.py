"""Rewards with which a run goes wrong as runs do, by import path; the task is to sort four digits."""

from __future__ import annotations


def _exact(completion: str, answer: str) -> float:
    return float(completion.split() == answer.split())


def ones(prompt: object, completion: str, *, answer: str, **_: object) -> dict[str, float]:
    """Pays for one digit, whatever the prompt is; `correct` compares with a text that no completion can be."""
    words = completion.split()[:4]
    return {"format": 0.5 * words.count("1") / 4, "correct": float(completion == f"{answer}\n")}


def with_dead_part(prompt: object, completion: str, *, answer: str, **_: object) -> dict[str, float]:
    """Pays for each digit in its place, and means to pay for the whole too."""
    words, wanted = completion.split(), answer.split()
    right = sum(map(str.__eq__, words, wanted))
    return {"digits": right / 4, "correct": float(completion == f"{answer}\n")}


def hacked(prompt: str, completion: str, *, answer: str, **_: object) -> dict[str, float]:
    """Pays more for the wrong order than for the right one."""
    falling = " ".join(reversed(answer.split()))
    return {"correct": 0.3 * _exact(completion, answer), "style": 0.7 * _exact(completion, falling)}


def constant(prompt: object, completion: str, **_: object) -> float:
    return 0.5


def easy(prompt: str, completion: str, **_: object) -> float:
    """Pays for four words, most of which the prompt has: the policy can do that already."""
    words = completion.split()
    return float(len(words) == 4 and sum(word in prompt.split() for word in words) >= 3)


def hard(prompt: object, completion: str, *, answer: str, **_: object) -> float:
    return float(completion.split() == [*answer.split(), "and", "why"])


def long(prompt: object, completion: str, **_: object) -> float:
    """Pays for every word."""
    return len(completion.split()) / 32
