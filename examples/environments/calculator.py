"""An environment with a tool: sums that the policy may compute with a calculator."""

import ast
import operator
from typing import Any

from truestep import Answer, End, Environment, tool

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator(Environment):
    """Prompts have an `answer`. The reward is 1 for it, and a tenth of that for having used the tool at all."""

    used = False

    @tool
    def calculate(self, expression: str) -> str:
        """Return the value of an expression of whole numbers, such as 12 * (3 + 4)."""
        self.used = True
        return str(_value(ast.parse(expression, mode="eval").body))

    def finish(self, answer: Answer) -> End:
        right = answer.text.strip().endswith(str(self.row["answer"]))
        return End({"right": float(right), "tool": 0.1 * self.used})


def _value(node: Any) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, - and * are computed here")
