"""Rewards for small runs, by import path. The processes that import them start in no time: nothing else is imported."""

from __future__ import annotations


def digit_reward(prompt: object, completion: str, **_: object) -> float:
    """Differs between most completions of a prompt, right or wrong."""
    return sum(int(word) for word in completion.split() if word.isdigit()) / 10


def digits_in_place(prompt: object, completion: str, *, answer: str, **_: object) -> float:
    """The share of an answer's digits that stand where they belong."""
    wanted, found = answer.split(), completion.split()
    return sum(a == b for a, b in zip(wanted, found, strict=False)) / max(len(wanted), len(found))


def one_reward(prompt: object, completion: str, **_: object) -> float:
    """The same for every completion: no group has a difference."""
    return 1.0


def hopeless_for_some(prompt: object, completion: str, **_: object) -> float:
    """0 for the prompts whose first number is even, 1 for those where it is 1, and between for the others."""
    first = int(str(prompt).split()[1])
    return 0.0 if first % 2 == 0 else 1.0 if first == 1 else 0.2 + sum(map(ord, completion)) % 97 / 1000


def in_parts(prompt: object, completion: str, **_: object) -> dict[str, float]:
    """Fails where the completion has an odd number of words, in a function of its own."""
    words = len(completion.split())
    return {"long": float(words), "half": _half(words)}


def _half(words: int) -> float:
    return {0: words / 2}[words % 2]


def failing_reward(prompt: object, completion: str, **_: object) -> float:
    raise KeyError("this reward never works")


def fails_in_two_ways(prompt: object, completion: str, **_: object) -> float:
    raise (KeyError, ValueError)[len(completion.split()) % 2]("this reward never works")


def failing_for_some(prompt: object, completion: str, **_: object) -> float:
    """Fails for about one completion in five, whatever words they are of."""
    return {remainder: remainder / 5 for remainder in range(1, 5)}[sum(map(ord, completion)) % 5]


def letter_reward(prompt: object, completion: str, **_: object) -> float:
    """Differs between most completions, whatever words they are of."""
    return sum(map(ord, completion)) % 97 / 10
