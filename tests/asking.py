"""A task of three turns: two digits are hidden, each is told to who asks for it by its number, and the answer is both,
smaller one first."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from truestep import Answer, End, Environment


class Asking(Environment):
    """The policy writes `1 =`, `2 =`, and then the digits."""

    def start(self, row: Any) -> str:
        generator = random.Random(row["id"])
        self.hidden = [str(generator.randint(0, 9)) for _ in range(2)]
        self.asked: list[str] = []
        return str(row["prompt"])

    def step(self, answer: Answer) -> Any:
        words = answer.text.replace("=", "").split()
        if len(self.asked) < 2:
            right = words == [str(len(self.asked) + 1)]
            self.asked.append(str(right))
            return self.hidden[int(words[0]) - 1] + " =" if words in (["1"], ["2"]) else "sort ="
        found = sum((Counter(words) & Counter(self.hidden)).values())
        asked = self.asked.count("True")
        return End({"asked": 0.25 * asked, "found": 0.25 * found, "right": float(words == sorted(self.hidden))})
