"""Rollouts for parity from the sampler of the configuration, as it is now: nothing is synced and nothing is probed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from truestep.assemble_server import server_maker
from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler, ServerSampler
from truestep.environments.prompts import Prompt, load_prompts
from truestep.policy.policy import Policy
from truestep.sampler.decode import DecodeOptions, Request, decode
from truestep.sampler.in_process import stop_ids
from truestep.sampler.server.answer import complete
from truestep.sampler.server.protocol import Asked
from truestep.types import Rollout


def sample(config: Config, policy: Policy, count: int) -> list[Rollout]:
    sampler = config.sampler
    assert sampler is not None
    known = load_prompts(sampler.prompts, policy.tokenizer, policy.vocabulary_size)
    prompts = list(islice(cycle(known), count))
    if isinstance(sampler, InProcessSampler):
        return _in_process(config, sampler, policy, prompts)
    return asyncio.run(_of_servers(sampler, policy, prompts))


def _in_process(config: Config, sampler: InProcessSampler, policy: Policy, prompts: Sequence[Prompt]) -> list[Rollout]:
    options = DecodeOptions(
        sampler.temperature, sampler.top_p, sampler.max_new_tokens, sampler.batch_size, stop_ids(policy)
    )
    requests = [Request(prompt.input_ids, (config.seed, number)) for number, prompt in enumerate(prompts)]
    return [
        _rollout(number, prompt, answer.token_ids, answer.logprobs, sampler.temperature)
        for number, (prompt, answer) in enumerate(zip(prompts, decode(policy, requests, options), strict=True))
    ]


async def _of_servers(sampler: ServerSampler, policy: Policy, prompts: Sequence[Prompt]) -> list[Rollout]:
    servers = server_maker(sampler)()

    async def one(number: int, prompt: Prompt) -> Rollout | None:
        asked = Asked(
            prompt.input_ids,
            1,
            sampler.temperature,
            sampler.max_new_tokens,
            stop_ids(policy),
            policy.vocabulary_size,
        )
        (choice,) = await complete(servers[number % len(servers)], asked, 0)
        if choice.aborted:
            return None
        return _rollout(number, prompt, choice.token_ids, choice.logprobs, sampler.temperature)

    try:
        made = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    finally:
        await asyncio.gather(*(server.close() for server in servers))
    return [rollout for rollout in made if rollout is not None]


def _rollout(number: int, prompt: Prompt, tokens: Sequence[int], given: Sequence[float], temperature: float) -> Rollout:
    ids = np.array([*prompt.input_ids, *tokens], dtype=np.int64)
    mask = np.arange(len(ids)) >= len(prompt.input_ids)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    logprobs[mask] = given
    return Rollout(f"{prompt.id}-{number}", ids, mask, logprobs=logprobs, temperature=temperature)
