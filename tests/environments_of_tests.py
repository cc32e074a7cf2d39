"""Environments of several turns for tests: plain ones, and ones that attack the run."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truestep.environments.episodes.environment import Answer, End, Environment, tool

LEFT_BEHIND = "import time; time.sleep(120)  # {}"


class Calculator(Environment):
    """Asks for a sum and offers a tool."""

    def __init__(self, unit: str = ""):
        super().__init__()
        self.unit = unit

    @tool
    def calculate(self, expression: str) -> str:
        """Return the value of a sum."""
        return str(sum(int(part) for part in expression.split("+"))) + self.unit

    def finish(self, answer: Answer) -> float:
        return float(answer.text.strip() == self.row["answer"])


class Counting(Environment):
    """Keeps state in its instance, its module's globals and its event loop, and draws random numbers."""

    seen: list[str] = []  # noqa: RUF012

    async def start(self, row: Any) -> list[Any]:
        self.loop = asyncio.get_running_loop()
        self.before = len(self.seen)
        self.drawn = random.random()
        await asyncio.sleep(0)
        return row["prompt"]

    async def step(self, answer: Answer) -> Any:
        assert self.loop is asyncio.get_running_loop()
        self.seen.append(answer.text)
        await asyncio.sleep(0)
        if answer.text == "end":
            return End(
                {"reward": len(self.seen), "before": self.before, "turns": self.turns, "drawn": self.drawn}, [0.5]
            )
        return f"{len(self.seen)} {self.before}"

    async def cut(self, reason: str) -> dict[str, float]:
        return {"reward": -1.0, reason: 1.0}


class Sleeping(Environment):
    """Takes 0.2 s for each turn, of which there are three."""

    def step(self, answer: Answer) -> Any:
        time.sleep(0.2)
        return 1.0 if self.turns == 3 else "go on"


class Tokens(Environment):
    """Speaks in tokens."""

    def start(self, row: Any) -> list[int]:
        return [1, 2, 3]

    def step(self, answer: Answer) -> Any:
        return (4, 5) if self.turns == 1 else True


class Failing(Environment):
    """Raises in every start."""

    def start(self, row: Any) -> str:
        raise ValueError(f"no row {row['prompt']}")


class Options(Environment):
    """Needs an option."""

    def __init__(self, needed: int):
        super().__init__()


NOTHING = 3


class Hostile(Environment):
    """Does in its first step what the row's `attack` names, and is good without one."""

    def start(self, row: Any) -> Any:
        return "go"

    def step(self, answer: Answer) -> Any:
        name = self.row.get("attack", "")
        return ATTACKS[name](self) if name in ATTACKS and self.turns == 1 else 0.5

    def process(self, text: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", LEFT_BEHIND.format(text)], start_new_session=True)


ATTACKS: dict[str, Callable[[Hostile], Any]] = {}


def attack(function: Callable[[Hostile], Any]) -> Callable[[Hostile], Any]:
    ATTACKS[function.__name__] = function
    return function


@attack
def hangs(self: Hostile) -> Any:
    while True:
        time.sleep(60)


@attack
def loops_without_signals(self: Hostile) -> Any:
    for number in range(1, 65):
        if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
            signal.signal(number, signal.SIG_IGN)
    while True:
        pass


@attack
def stops_itself(self: Hostile) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


@attack
def exits(self: Hostile) -> Any:
    os._exit(7)


@attack
def exits_by_exception(self: Hostile) -> Any:
    sys.exit(3)


@attack
def raises(self: Hostile) -> Any:
    return {}["no such key"]


@attack
def kills_itself(self: Hostile) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@attack
def kills_its_parent(self: Hostile) -> Any:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@attack
def stops_its_parent(self: Hostile) -> Any:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(60)


def of_parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@attack
def kills_its_supervisor(self: Hostile) -> Any:
    os.kill(of_parent(os.getppid()), signal.SIGKILL)
    time.sleep(60)


@attack
def stops_its_supervisor(self: Hostile) -> Any:
    os.kill(of_parent(os.getppid()), signal.SIGSTOP)
    time.sleep(60)


@attack
def leaves_a_session_behind(self: Hostile) -> Any:
    """A grandchild whose parent has exited, in a session of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        self.process(self.row["mark"])
        os._exit(0)
    os.waitpid(child, 0)
    return 0.25


@attack
def leaves_a_session_behind_and_exits(self: Hostile) -> Any:
    leaves_a_session_behind(self)
    os._exit(9)


@attack
def leaves_a_session_behind_and_hangs(self: Hostile) -> Any:
    leaves_a_session_behind(self)
    time.sleep(60)


@attack
def leaves_a_session_behind_and_goes_on(self: Hostile) -> Any:
    leaves_a_session_behind(self)
    return "go on"


def each_descriptor(data: bytes) -> None:
    for number in range(3, 300):
        try:
            os.write(number, data)
        except OSError:
            continue


@attack
def writes_garbage(self: Hostile) -> Any:
    each_descriptor(b"garbage" * 100)
    return 1000.0


@attack
def forges(self: Hostile) -> Any:
    """Answers as other calls and other episodes might be answered."""
    body = b'{"nonce": "0", "end": {"reward": 1000.0, "parts": {}, "turn_rewards": []}}'
    each_descriptor(len(body).to_bytes(4, "big") + body)
    time.sleep(60)


@attack
def announces_gigabytes(self: Hostile) -> Any:
    each_descriptor(b"\xff\xff\xff\xff")
    time.sleep(60)


@attack
def closes_every_descriptor(self: Hostile) -> Any:
    os.closerange(0, 1024)
    time.sleep(60)


@attack
def floods_its_output(self: Hostile) -> Any:
    line = "x" * 1000
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        print(line)
    return 0.25


@attack
def takes_memory(self: Hostile) -> Any:
    self.taken = [bytearray(os.urandom(1)) * 2**20 for _ in range(1000)]
    return 0.25


@attack
def takes_memory_in_children(self: Hostile) -> Any:
    for _ in range(4):
        if os.fork() == 0:
            taken = bytearray(b"x") * (200 * 2**20)
            time.sleep(60)
            os._exit(len(taken) == 0)
    time.sleep(60)


@attack
def forks_without_end(self: Hostile) -> Any:
    while True:
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        except OSError:
            time.sleep(0.1)


@attack
def returns_nan(self: Hostile) -> Any:
    return math.nan


@attack
def returns_nan_in_a_message(self: Hostile) -> Any:
    return [{"role": "user", "content": "x", "score": math.nan}]


@attack
def returns_nan_in_turn_rewards(self: Hostile) -> Any:
    return End(1.0, [math.nan])


@attack
def returns_too_many_turn_rewards(self: Hostile) -> Any:
    return End(1.0, [0.0, None])


@attack
def returns_10_megabytes(self: Hostile) -> Any:
    return "x" * 10_000_000


@attack
def returns_20_megabytes(self: Hostile) -> Any:
    return "x" * 20_000_000


@attack
def returns_nothing(self: Hostile) -> Any:
    return None


@attack
def returns_bytes(self: Hostile) -> Any:
    return b"no"


@attack
def returns_a_message(self: Hostile) -> Any:
    return {"role": "user", "content": "x"}


@attack
def returns_a_message_without_role(self: Hostile) -> Any:
    return [{"content": "x"}]


@attack
def returns_a_mixed_list(self: Hostile) -> Any:
    return [1, "two"]


@attack
def returns_an_empty_list(self: Hostile) -> Any:
    return []


@attack
def returns_a_negative_token(self: Hostile) -> Any:
    return [1, -1]


@attack
def returns_half_a_character(self: Hostile) -> Any:
    return "\ud800"


@attack
def returns_an_object_in_a_message(self: Hostile) -> Any:
    return [{"role": "user", "content": [Path()]}]


@attack
def returns_a_part_that_is_text(self: Hostile) -> Any:
    return {"reward": 1.0, "style": "good"}
