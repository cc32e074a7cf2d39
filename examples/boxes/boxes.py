"""Boxes that hold numbers and colours. A question needs two calls of a tool, and so three turns.

`4172: find 3` asks for a colour. In the room 4172, box 3 holds the number of another box, and that one holds the
colour. What the boxes hold differs from room to room.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from truestep import Answer, Environment, tool

COLOURS = ("red", "blue", "green", "black", "white", "pink", "brown", "grey", "gold", "lime")
GOOD = 0.7  # of the turns of a demonstration


class Boxes(Environment):
    """The reward is 1 for the right colour as the last turn, and else 0."""

    @tool
    def open(self, box: int) -> str:
        """Return what is in a box."""
        return str(self.row["boxes"][box]) if 0 <= box < len(self.row["boxes"]) else "nothing"

    def finish(self, answer: Answer) -> float:
        return float(answer.text == self.row["answer"])

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[dict[str, Any]]:
        return questions(range(9000, 9256) if held_out else range(1000, 3000))


def questions(rooms: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield a question for each room, with the contents of its boxes and the answer."""
    for room in rooms:
        source = random.Random(room)
        first, second = source.sample(range(10), 2)
        boxes: list[int | str] = [source.choice(COLOURS) for _ in range(10)]
        boxes[first] = second
        prompt = [{"role": "user", "content": f"{room}: find {first}"}]
        yield {"id": f"room-{room}", "prompt": prompt, "boxes": boxes, "first": first, "answer": boxes[second]}


def demonstrations(seed: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations in which three turns in ten go wrong: it opens any box, or says any colour."""
    source = random.Random(seed)
    for row in questions(source.choices(range(1000, 5000), k=count)):
        messages, box = list(row["prompt"]), row["first"]
        for _ in range(2):
            box = box if isinstance(box, int) and source.random() < GOOD else source.randrange(10)
            call = {"name": "open", "arguments": {"box": box}}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
            box = row["boxes"][box]
            messages.append({"role": "tool", "name": "open", "content": str(box)})
        answer = box if isinstance(box, str) and source.random() < GOOD else source.choice(COLOURS)
        yield [*messages, {"role": "assistant", "content": answer}]
