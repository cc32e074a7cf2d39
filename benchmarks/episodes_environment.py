"""The environment of `episodes.py`: a tool that takes its time, and says as many tokens each turn.

Imports no torch: the processes of episodes import this file.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from truestep import Answer, Environment


class Tool(Environment):
    def __init__(self, prompt: int, given: int, turns: int, tool: float):
        super().__init__()
        self.prompt, self.given, self.most, self.tool = prompt, given, turns, tool

    def start(self, row: Any) -> list[int]:
        return [random.randrange(30) for _ in range(self.prompt)]

    async def step(self, answer: Answer) -> Any:
        await asyncio.sleep(self.tool)
        return 1.0 if self.turns == self.most else [random.randrange(30) for _ in range(self.given)]
