"""A user's own code, for the tests of Python programs: all of it at the top level of a module.

Workers that rate import it too, so it imports torch only where a trainer calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def reward(prompt: object, completion: str, **_: object) -> float:
    return sum(int(word) for word in completion.split() if word.isdigit()) / 10


def advantages(rollouts: Sequence[Any]) -> list[float]:
    best = max(rollout.reward or 0.0 for rollout in rollouts)
    return [(rollout.reward or 0.0) - best for rollout in rollouts]


def sgd(groups: Any, *, momentum: float = 0.0) -> Any:
    import torch

    return torch.optim.SGD([*groups["matrices"].values(), *groups["vectors"].values()], momentum=momentum)


def records(start: int, *, seed: int = 5, count: int = 20) -> Iterator[Mapping[str, Any]]:
    """Records of tests/tiny.py from one number on."""
    from tiny import make_records

    yield from make_records(seed, documents=count, max_length=16)[start:]


def odd_records(start: int) -> Iterator[Any]:
    from tiny import make_records

    good = make_records(5, documents=4, max_length=16)
    yield from [*good[:2], "no record", {**good[2], "input_ids": object()}, *good[2:]][start:]


def failing_records(start: int) -> Iterator[Mapping[str, Any]]:
    from tiny import make_records

    yield from make_records(5, documents=4, max_length=16)
    raise OSError("the queue is gone")


class Sink:
    """Writes the steps that it hears of into a file of its own."""

    def __init__(self, directory: Path, options: Mapping[str, Any], done: int):
        self._file = directory / "own.txt"
        assert options["model"]["path"]
        self._say(f"begin {done}")

    def _say(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def step(self, line: Mapping[str, Any]) -> None:
        self._say(f"step {line['step']}")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._say(f"evaluation {line['step']}")

    def close(self) -> None:
        self._say("close")


class Holder:
    def method(self, prompt: object, completion: str) -> float:
        return 0.0

    @staticmethod
    def static(prompt: object, completion: str) -> float:
        return 0.0

    def __call__(self, prompt: object, completion: str) -> float:
        return 0.0
