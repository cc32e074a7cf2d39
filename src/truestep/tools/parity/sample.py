"""Samples rollouts from the configured sampler without changing it: no weights are published, and no probes are
made."""

import asyncio
from collections.abc import Sequence
from itertools import cycle, islice

from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler, SamplerConfig, ServerSampler
from truestep.environments.prompts import Prompt
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import Completion, DrawOptions, Generate, Request, run_all
from truestep.generate.play import rollout_of, sequence_of
from truestep.generate.read import stop_ids
from truestep.generate.servers.check import find_routes
from truestep.generate.servers.check_answer import complete
from truestep.model.policy import Policy
from truestep.run.assemble.rewards import Raters, made_rows
from truestep.run.assemble.servers import server_maker
from truestep.run.assemble.sources import asked_of_servers, draw_options, engine_settings, read_prompts
from truestep.types import Rollout, RouteShape


def sample(config: Config, sampler: SamplerConfig, policy: Policy, count: int) -> list[Rollout]:
    """Sample one completion for each of `count` prompts. Return fewer if a server aborts some."""
    raters = Raters()
    try:
        rows = made_rows(config, policy.weights.ranks, raters)
    finally:
        raters.close()
    prompts = list(islice(cycle(read_prompts(sampler.prompts, rows, policy)), count))
    if isinstance(sampler, InProcessSampler):
        return _sample_in_process(sampler, policy, prompts, config.seed)
    return asyncio.run(_ask_servers(sampler, policy, prompts, asked_of_servers(config, policy)))


def _sample_in_process(
    sampler: InProcessSampler, policy: Policy, prompts: Sequence[Prompt], seed: int
) -> list[Rollout]:
    draw = draw_options(sampler, policy)
    requests = [Request(prompt.input_ids, draw, (seed, number)) for number, prompt in enumerate(prompts)]

    async def complete(request: Request, generate: Generate) -> Completion:
        return await generate(request)

    completions = EngineGenerator(policy, engine_settings(sampler)).map(requests, complete)
    return [
        _rollout(number, prompt, completion, sampler)
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


async def _ask_servers(
    sampler: ServerSampler, policy: Policy, prompts: Sequence[Prompt], routes: RouteShape | None
) -> list[Rollout]:
    servers = server_maker(sampler)()
    draw = DrawOptions(sampler.temperature, sampler.max_new_tokens, stop_ids(policy))

    async def ask(number: int, prompt: Prompt) -> Rollout | None:
        server = servers[number % len(servers)]
        try:
            (completion,) = await complete(server, Request(prompt.input_ids, draw), 1, policy.vocabulary_size, 0)
        except (UnreachableError, BadAnswerError) as error:
            raise ServerError(f"sampler.urls: {server.url} gave no completion: {error}") from error
        return None if completion.aborted else _rollout(number, prompt, completion, sampler)

    try:
        for server in servers:
            server.routes = routes
            await find_routes(server, prompts, policy.vocabulary_size)
        rollouts = await run_all([ask(number, prompt) for number, prompt in enumerate(prompts)])
    finally:
        await asyncio.gather(*(server.close() for server in servers))
    return [rollout for rollout in rollouts if rollout is not None]


def _rollout(number: int, prompt: Prompt, completion: Completion, sampler: SamplerConfig) -> Rollout:
    name, temperature = f"{prompt.id}-{number}", sampler.temperature
    sequence, known = sequence_of(prompt.input_ids, completion), {"prompt_id": prompt.id}
    return rollout_of(sequence, id=name, temperature=temperature, metadata=known)
