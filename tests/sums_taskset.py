"""A taskset of the package verifiers, with a tool or without. Its questions are in words of tests/tool_models.py."""

from __future__ import annotations

import time
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculate(self, expression: str) -> str:
        """Return the value of a sum."""
        return str(sum(int(part) for part in expression.split("+")))


class SumsConfig(vf.TaskConfig):
    has_tools: bool = False
    fails: tuple[str, ...] = ()  # how a task fails, by its number
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Sums(vf.Task[SumsData, vf.State, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [SumsTools(config.tools)] if config.has_tools else []

    def is_failing(self, how: str) -> bool:
        return how in self.config.fails[self.data.idx : self.data.idx + 1]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.is_failing("setup"):
            raise ValueError("this task cannot be set up")

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if self.is_failing("reward"):
            raise ZeroDivisionError("nothing to divide by")
        if self.is_failing("hang"):
            time.sleep(60)
        return score(trace.last_reply, self.data.answer)

    @vf.reward
    async def called(self, trace: vf.Trace) -> float:
        return float(sum(message.content == self.data.answer for message in trace.tool_messages))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


def score(reply: str, answer: str) -> float:
    """A tenth for each time that the reply says the answer."""
    return reply.split().count(answer) / 10


class SumsTasksetConfig(vf.TasksetConfig):
    task: SumsConfig = SumsConfig()
    count: int = 12


class SumsTaskset(vf.Taskset[Sums, SumsTasksetConfig]):
    def load(self) -> Iterator[Sums]:
        for number in range(self.config.count):
            data = SumsData(name=f"sum {number}", prompt="what is 1+2" + " is" * number, answer="3")
            yield Sums(data, self.config.task)


if __name__ == "__main__":
    SumsTools.run()
