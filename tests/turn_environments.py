"""Environments that the tests of episodes play: they are imported by the run's processes."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar

from truestep import Answer, End, Environment, tool


class Sorting(Environment):
    """Answers each turn with the next digits, three times, and rewards the digits of all turns that come in order."""

    def __init__(self, turns: int = 3, says: str = "sort 3 1 ="):
        super().__init__()
        self.most, self.says, self.rewards = turns, says, []

    def step(self, answer: Answer) -> Any:
        words = [word for word in answer.text.split() if word.isdigit()]
        self.rewards.append(sum(first <= second for first, second in pairwise(words)) / 4)
        if len(self.rewards) == self.most:
            return End({"order": sum(self.rewards), "length": 0.01 * len(words)}, self.rewards)
        return self.says

    def cut(self, reason: str) -> float:
        return -1.0


class Unsteady(Environment):
    """Draws random numbers, takes its time, and fails now and then."""

    def step(self, answer: Answer) -> Any:
        time.sleep(random.random() * 0.01)
        if len(answer.text) % 7 == 3:
            raise ValueError("this episode cannot go on")
        if self.turns == 3:
            return End(len(answer.text) / 10 + random.random())
        return f"sort {random.randint(0, 9)} ="


class Tokens(Environment):
    """Speaks in tokens."""

    def start(self, row: Any) -> list[int]:
        return [2, 3, 4]

    def step(self, answer: Answer) -> Any:
        self.asked = getattr(self, "asked", 0) + 1
        return End(1.0) if self.asked == 2 else [5, 6]


class Sleeping(Environment):
    def step(self, answer: Answer) -> Any:
        time.sleep(60)


class Failing(Environment):
    """Fails where the prompt's first digit is odd."""

    def step(self, answer: Answer) -> Any:
        if int(self.row["prompt"].split()[1]) % 2:
            raise ValueError("this environment cannot go on")
        return End(float(len(answer.text)))


class Tooled(Environment):
    """Has two tools, one of which fails to answer now and then, and rewards each turn."""

    def start(self, row: Any) -> list[dict[str, Any]]:
        self.rewards: list[float | None] = []
        return [{"role": "user", "content": row["prompt"]}]

    @tool
    def calculate(self, expression: str) -> str:
        """Return the value of a sum."""
        time.sleep(0.003)
        return str(sum(int(part) for part in expression.split("+")))

    @tool
    async def look(self) -> str:
        """Look at it."""
        return "seen"

    def step(self, answer: Answer) -> Any:
        self.rewards.append(0.25 * len(answer.tool_calls) or None)
        print("turn", self.turns)
        return super().step(answer)

    def finish(self, answer: Answer) -> End:
        return End(float("3" in answer.text), self.rewards)


class Own(Sorting):
    """Makes its own prompts. The first two of those for evaluation are the last two for training."""

    def __init__(self, turns: int = 1, count: int = 8, drawn: bool = False):
        super().__init__(turns)

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[dict[str, Any]]:
        count = options.get("count", 8)
        for number in range(count - 2, count + 3) if held_out else range(count):
            digit = os.urandom(1)[0] % 10 if options.get("drawn") else number // 10
            yield {"id": f"own-{number}", "prompt": f"sort {digit} {number % 10} =", "number": number}


class Made(Sorting):
    """Makes the rows that its option names."""

    def __init__(self, rows: str):
        super().__init__()

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Any:
        return getattr(cls, options["rows"])(held_out)

    @staticmethod
    def many(held_out: bool) -> Iterator[dict[str, Any]]:
        for number in range(300):  # 3 MB and more
            yield {"prompt": f"p{number}", "held_out": held_out, "drawn": random.random(), "long": "x" * 10_000}

    @staticmethod
    def slow(held_out: bool) -> Iterator[dict[str, Any]]:
        for number in range(3):
            time.sleep(2.2)
            yield {"prompt": str(number)}

    @staticmethod
    def none(held_out: bool) -> Any:
        return None

    @staticmethod
    def empty(held_out: bool) -> Any:
        return []

    @staticmethod
    def raises(held_out: bool) -> Iterator[dict[str, Any]]:
        yield {"prompt": "p"}
        raise ValueError("no more of them")

    @staticmethod
    def hangs(held_out: bool) -> Any:
        time.sleep(60)

    @staticmethod
    def exits(held_out: bool) -> Any:
        os._exit(3)

    @staticmethod
    def texts(held_out: bool) -> Any:
        return ["sort 3 1 ="]

    @staticmethod
    def objects(held_out: bool) -> Any:
        return [{"prompt": "p", "answer": {1, 2}}]


class Prepared(Sorting):
    """Counts how often it is prepared, and has a tool by that name."""

    times = 0

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        cls.times += 1
        return {f"tool_{cls.times}": {"type": "function"}}

    def step(self, answer: Answer) -> Any:
        return End(float(self.times))


class Seeded(Environment):
    """Says whether numpy's generators, which numpy imports late, were there when its process was forked."""

    there: ClassVar[list[bool]] = []

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        import numpy  # noqa: F401

        os.register_at_fork(after_in_child=lambda: cls.there.append("numpy.random" in sys.modules))
        return super().prepare(options)

    def step(self, answer: Answer) -> Any:
        return End({"there": float(self.there[0]), "drawn": sys.modules["numpy"].random.random()})
