"""An environment of the package verifiers that talks to its agent for several turns, and scores the whole talk."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["TalkEnv", "TalkTaskset"]
SAID = ("what is 1+2", "is 3 1+2", "what is what")


class Talk(vf.Task[vf.TaskData]):
    pass


class TalkTaskset(vf.Taskset[Talk, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Talk]:
        number = 0
        while True:
            yield Talk(vf.TaskData(prompt=None, system_prompt="what" + " is" * number))
            number += 1


class TalkEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            for said in SAID:
                if (await talk.turn(said)).terminated:
                    break

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        (trace,) = episode.traces
        words = " ".join(message.content or "" for message in trace.assistant_messages).split()
        trace.record_reward("threes", words.count("3") / 10)
