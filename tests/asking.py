"""A task of three turns: two digits are hidden, each is told to who asks for it by its number, and the answer is both,
smaller one first. And demonstrations of it, most of which go wrong somewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from truestep import Answer, End, Environment

PROMPT = "sort ="
GOOD = 0.75  # of the turns of a demonstration


def hidden_of(name: str) -> list[str]:
    generator = random.Random(name)
    return [str(generator.randint(0, 9)) for _ in range(2)]


class Asking(Environment):
    """The policy writes `1 =`, `2 =`, and then the digits."""

    def start(self, row: Any) -> str:
        self.hidden = hidden_of(row["id"])
        self.asked = 0
        return str(row["prompt"])

    def step(self, answer: Answer) -> Any:
        words = answer.text.replace("=", "").split()
        if self.turns < 3:
            self.asked += words == [str(self.turns)]
            return self.hidden[int(words[0]) - 1] + " =" if words in (["1"], ["2"]) else "sort ="
        return End({"asked": 0.25 * self.asked, "right": float(words == sorted(self.hidden))})

    def cut(self, reason: str) -> float:
        return 0.0


def demonstrations(tokenizer: Any, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Records for supervised training. Each turn goes wrong now and then."""
    generator = random.Random(seed)
    for number in range(count):
        hidden = [str(generator.randint(0, 9)) for _ in range(2)]
        ids, mask = list(tokenizer(PROMPT)["input_ids"]), []
        mask = [0] * len(ids)
        for turn in (1, 2):
            asks = str(turn) if generator.random() < GOOD else str(generator.randint(0, 9))
            says = hidden[int(asks) - 1] if asks in ("1", "2") else "sort"
            for text, own in ((f"{asks} =", 1), (f"{says} =", 0)):
                part = tokenizer(text)["input_ids"]
                ids, mask = [*ids, *part], [*mask, *[own] * len(part)]
        last = sorted(hidden) if generator.random() < GOOD else [str(generator.randint(0, 9)) for _ in range(2)]
        part = [*tokenizer(" ".join(last))["input_ids"], tokenizer.eos_token_id]
        yield {"id": str(number), "input_ids": [*ids, *part], "loss_mask": [*mask, *[1] * len(part)]}
