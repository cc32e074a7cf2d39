"""A calculator that does one operation a call. A question needs two calls, and so three turns."""

import operator
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from truestep import Answer, Environment, tool

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")
FORMS = ("({a} + {b}) * {c}", "({a} - {b}) * {c}", "{a} * {c} + {b}", "{a} * {c} - {b}", "{b} + {a} * {c}")


class Calculator(Environment):
    """The reward is 1 for the right number as the last turn, and else 0."""

    @tool
    def calculate(self, expression: str) -> str:
        """Return the value of one operation on two whole numbers, such as 12 * 34."""
        found = OPERATION.fullmatch(str(expression))
        if found is None:
            return "error: expected one operation on two whole numbers, such as 12 * 34"
        left, sign, right = found.groups()
        return str(OPERATIONS[sign](int(left), int(right)))

    def finish(self, answer: Answer) -> float:
        return float(answer.text.strip() == self.row["answer"])

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[dict[str, Any]]:
        return questions("held out" if held_out else "train", 128 if held_out else 2000)


def questions(seed: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield different questions, with their answers and the operations that lead to them."""
    source, asked = random.Random(f"calculator {seed}"), set()
    while len(asked) < count:
        a, b, c = source.randint(10, 99), source.randint(10, 99), source.randint(2, 9)
        expression = source.choice(FORMS).format(a=a, b=b, c=c)
        if expression in asked:
            continue
        asked.add(expression)
        first, second = operations(expression)
        prompt = [{"role": "user", "content": f"What is {expression}?"}]
        yield {"id": f"{seed}-{len(asked)}", "prompt": prompt, "answer": second[1], "operations": [first, second]}


def operations(expression: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the two operations of an expression, in their order, each with its value."""
    inner = re.search(r"\((.*)\)", expression) or re.search(r"(\d+ \* \d+)", expression)
    assert inner is not None
    first = (inner[1], value(inner[1]))
    rest = expression.replace(inner[0], first[1])
    return first, (rest, value(rest))


def value(operation: str) -> str:
    return Calculator().calculate(operation)


def demonstrations(seed: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations that answer a question as the environment would have it."""
    for row in questions(seed, count):
        messages = list(row["prompt"])
        for operation, result in row["operations"]:
            call = {"name": "calculate", "arguments": {"expression": operation}}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
            messages.append({"role": "tool", "name": "calculate", "content": result})
        yield [*messages, {"role": "assistant", "content": row["answer"]}]
