"""Samples rollouts from the configured sampler as it is: without publication of weights and without probes."""

import asyncio
from collections.abc import Sequence
from itertools import cycle, islice

from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler, SamplerConfig, ServerSampler
from truestep.environments.prompts import Prompt
from truestep.generate.decode import Request, decode
from truestep.generate.groups import to_rollout
from truestep.generate.in_process import stop_ids
from truestep.generate.servers.check_answer import complete
from truestep.generate.servers.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.servers.protocol import CompletionRequest
from truestep.model.policy import Policy
from truestep.run.assemble.sources import decode_options, read_prompts, server_maker
from truestep.types import Rollout


def sample(config: Config, sampler: SamplerConfig, policy: Policy, count: int) -> list[Rollout]:
    """Sample one completion for each of `count` prompts. Return fewer if a server has aborted some."""
    prompts = list(islice(cycle(read_prompts(sampler, policy)), count))
    if isinstance(sampler, InProcessSampler):
        return _sample_in_process(sampler, policy, prompts, config.seed)
    return asyncio.run(_ask_servers(sampler, policy, prompts))


def _sample_in_process(
    sampler: InProcessSampler, policy: Policy, prompts: Sequence[Prompt], seed: int
) -> list[Rollout]:
    requests = [Request(prompt.input_ids, (seed, number)) for number, prompt in enumerate(prompts)]
    completions = decode(policy, requests, decode_options(sampler, policy))
    return [
        _rollout(number, prompt, completion.token_ids, completion.logprobs, sampler)
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


async def _ask_servers(sampler: ServerSampler, policy: Policy, prompts: Sequence[Prompt]) -> list[Rollout]:
    servers = server_maker(sampler)()
    ends = stop_ids(policy)

    async def ask(number: int, prompt: Prompt) -> Rollout | None:
        server = servers[number % len(servers)]
        request = CompletionRequest(
            prompt.input_ids, 1, sampler.temperature, sampler.max_new_tokens, ends, policy.vocabulary_size
        )
        try:
            (choice,) = await complete(server, request, 0)
        except (UnreachableError, BadAnswerError) as error:
            raise ServerError(f"sampler.urls: {server.url} gave no completion: {error}") from error
        return None if choice.aborted else _rollout(number, prompt, choice.token_ids, choice.logprobs, sampler)

    try:
        rollouts = await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
    finally:
        await asyncio.gather(*(server.close() for server in servers))
    return [rollout for rollout in rollouts if rollout is not None]


def _rollout(
    number: int, prompt: Prompt, token_ids: Sequence[int], logprobs: Sequence[float], sampler: SamplerConfig
) -> Rollout:
    return to_rollout(f"{prompt.id}-{number}", prompt, token_ids, logprobs, temperature=sampler.temperature)
