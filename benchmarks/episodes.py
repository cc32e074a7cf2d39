"""Tokens per second of episodes of several turns with a tool, beside as many single turns, on one GPU.

    python benchmarks/episodes.py [--episodes 256 --turns 6 --prompt 512 --drawn 128 --given 128 --tool 0.05]

Real processes play the episodes, as in a run: each waits for its tool at every turn. Single turns are as many requests
at once: with the episodes' first prompt, and with the prompts that the episodes' turns have. Weights are random, in
bfloat16 and of Qwen3's shape; every turn draws all of its tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch
from sampling import VOCABULARY, Rates, sized, timed
from tails import Numbers

from truestep.environments.episodes.service import EpisodeService
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.environment import EnvironmentPlay, EpisodeLimits
from truestep.generate.generator import Completion, DrawOptions, Generate, Request
from truestep.generate.play import Episode, Played
from truestep.model.policy import Policy


def single_turns(policy: Policy, given: argparse.Namespace, prompts: list[int], rows: int) -> float:
    """Tokens drawn per second of requests with prompts of these lengths, all at once."""
    generator = np.random.default_rng(1)
    draw = DrawOptions(1.0, given.drawn, frozenset())
    asked = [
        Request(tuple(generator.integers(0, VOCABULARY, length).tolist()), draw, (3, number))
        for number, length in enumerate(prompts)
    ]

    async def work(request: Request, generate: Generate) -> Completion:
        return await generate(request)

    service = EngineGenerator(policy, EngineSettings(rows=rows, longest=max(prompts) + given.drawn))
    took, made = timed(lambda: service.map(asked, work))
    return sum(len(answer.token_ids) for answer in made) / took


def episodes(
    policy: Policy, given: argparse.Namespace, plays: EnvironmentPlay, longest: int
) -> tuple[float, float, float]:
    """Tokens drawn per second of all episodes, the part of their prompts' new tokens that was computed, and the part of
    the time in which all episodes waited for their tools."""
    draw = DrawOptions(1.0, given.drawn, frozenset())
    prompt = Prompt("p", "", {}, (3, 4))
    asked = [Episode(prompt, draw, (4, number), f"e{number}") for number in range(given.episodes)]

    async def work(episode: Episode, generate: Generate) -> Played:
        async def until_full(request: Request) -> Completion:  # a full turn counts as one that ended by itself
            return replace(await generate(request), stopped=True)

        return await plays.play(episode, until_full)

    service = EngineGenerator(policy, EngineSettings(rows=given.episodes, longest=longest))
    took, made = timed(lambda: service.map(asked, work))
    reasons = {str(played.rating) for played in made if played.num_drawn != given.turns * given.drawn}
    if reasons:
        raise SystemExit(f"episodes ended early: {sorted(reasons)[:3]}")
    new = given.episodes * (given.prompt + (given.turns - 1) * given.given)
    idle = service.spent.idle / service.spent.sampling
    return sum(played.num_drawn for played in made) / took, service.spent.prompt_tokens / new, idle


class Words(Numbers):
    def __len__(self) -> int:
        return VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--drawn", type=int, default=128)
    parser.add_argument("--given", type=int, default=128)
    parser.add_argument("--tool", type=float, default=0.05, help="seconds")
    parser.add_argument("--size", default="1.7B")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    rates = Rates()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {rates.copy / 1e12:.2f} TB/s", flush=True)
    policy = sized(given.size)
    longest = given.prompt + given.turns * (given.drawn + given.given)
    options = {"prompt": given.prompt, "given": given.given, "turns": given.turns, "tool": given.tool}
    service = EpisodeService(WorkerOptions("episodes_environment:Tool", 60.0, 2**31), given.workers, options)
    plays = EnvironmentPlay(service, Words(), EpisodeLimits(100, longest, 600.0))
    count = given.episodes * given.turns
    by_turn = [given.prompt + turn * (given.drawn + given.given) for turn in range(given.turns)] * given.episodes
    try:
        for _ in range(given.rounds):
            rate, part, idle = episodes(policy, given, plays, longest)
            first = single_turns(policy, given, [given.prompt] * count, given.episodes)
            whole = single_turns(policy, given, by_turn, given.episodes)
            print(
                f"{given.episodes} episodes of {given.turns} turns: {rate:,.0f} tokens/s, {part:.3f} of the new prompt "
                f"tokens computed, {idle:.1%} of the time with nothing to compute; {count} single turns behind "
                f"{given.prompt} tokens {first:,.0f} "
                f"({rate / first:.0%}), behind the episodes' own prompts {whole:,.0f} ({rate / whole:.0%})",
                flush=True,
            )
    finally:
        plays.close()


if __name__ == "__main__":
    main()
