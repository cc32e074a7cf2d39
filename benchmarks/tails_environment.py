"""The environment of `tails.py`: it sleeps at each turn, and a share of its episodes hang, exit or write nonsense.

Imports no torch: the processes of episodes import this file.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

from truestep import Answer, Environment

KINDS = ("hang", "exit", "flood", "garbage")


class Unsteady(Environment):
    """Ends after `turns` turns. Of the episodes, `share` are unhealthy: each kind as often, at a turn by chance."""

    def __init__(self, turns: int, sleep: float, share: float):
        super().__init__()
        self.most, self.sleep = turns, sleep
        self.kind = random.choice(KINDS) if random.random() < share else None
        self.turn = random.randint(1, turns)  # at which it shows

    def start(self, row: Any) -> list[int]:
        return [3, 4]

    async def step(self, answer: Answer) -> Any:
        await asyncio.sleep(random.random() * self.sleep)
        if self.kind is not None and self.turns == self.turn:
            return getattr(self, self.kind)()
        return random.random() if self.turns == self.most else [7, 8]

    def hang(self) -> Any:
        while True:
            time.sleep(60)

    def exit(self) -> Any:
        os._exit(7)

    def flood(self) -> Any:
        print("flood " * 2**18, flush=True)
        return "flood " * 2**22

    def garbage(self) -> Any:
        if random.random() < 0.5:
            return {"neither": object()}
        for descriptor in range(3, 32):  # one of them is the connection to the run
            try:
                os.write(descriptor, b"\xff" * 64)
            except OSError:
                continue
        return [7, 8]
