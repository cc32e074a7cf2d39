"""A user's task, for the tests of its door: say a digit again and again. The prompt's record says which one."""

from __future__ import annotations

from typing import Any


def prompts() -> list[dict[str, Any]]:
    """Records of sampler.prompts: beside the prompt, any fields, which are handed to the reward by name."""
    return [{"id": f"say-{digit}", "prompt": f"sort {digit} {digit} =", "wanted": digit} for digit in (3, 8)]


def reward(prompt: str, completion: str, *, wanted: int, **_: object) -> float:
    """The share of words that are the wanted digit."""
    words = completion.split()
    return words.count(str(wanted)) / max(len(words), 1)


def strict_reward(prompt: str, completion: str, *, wanted: int, **_: object) -> float:
    """All or nothing, for the evaluation alone."""
    return float(set(completion.split()) == {str(wanted)})
