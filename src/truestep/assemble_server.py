"""From options to a source of rollouts from servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from truestep.config.schema import Config
from truestep.config.sections import ServerSampler
from truestep.custom import check_options, load_custom
from truestep.environments.prompts import load_prompts
from truestep.environments.reward_pool import RewardPool
from truestep.policy.policy import Policy
from truestep.rollouts.source import SourceError
from truestep.sampler.groups import check_lengths
from truestep.sampler.in_process import stop_ids
from truestep.sampler.server.ahead import Pace
from truestep.sampler.server.making import SamplingOptions
from truestep.sampler.server.protocol import InferenceServer
from truestep.sampler.server.source import ServerSource, ThreadedRewards
from truestep.sampler.server.sync import WeightsDirectory

# A probe's mean over likely tokens. In float32 two engines differ by rounding alone; bfloat16 keeps three digits.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def make_server_source(config: Config, policy: Policy) -> ServerSource:
    sampler, data, schedule = config.sampler, config.data, config.schedule
    assert (
        isinstance(sampler, ServerSampler) and data.group_size is not None and config.checkpoint.directory is not None
    )
    prompts = load_prompts(sampler.prompts, policy.tokenizer, policy.vocabulary_size)
    check_lengths(prompts, sampler.max_new_tokens, data.tokens_per_microbatch)
    return ServerSource(
        policy=policy,
        prompts=prompts,
        make_servers=server_maker(sampler),
        rewards=ThreadedRewards(
            RewardPool(sampler.reward, sampler.reward_workers, sampler.reward_timeout), sampler.reward_workers
        ),
        sampling=SamplingOptions(
            group_size=data.group_size,
            seed=config.seed,
            temperature=sampler.temperature,
            max_new_tokens=sampler.max_new_tokens,
            stop_ids=stop_ids(policy),
            vocabulary_size=policy.vocabulary_size,
            stop_at_rejected=data.on_bad_record == "stop",
        ),
        pace=Pace(
            docs_per_step=schedule.docs_per_step,
            documents_per_take=schedule.docs_per_step * schedule.updates_per_batch,
            max_staleness=sampler.max_staleness,
            concurrency=sampler.concurrency,
            stall_timeout=schedule.stall_timeout,
        ),
        weights=WeightsDirectory(Path(sampler.weights_directory or Path(config.checkpoint.directory) / "weights")),
        weights_dtype=getattr(torch, config.model.dtype),
        advantage_rule=data.advantages,
        pause=sampler.pause,
        tolerance=sampler.tolerance or _TOLERANCE[config.model.dtype],
    )


def server_maker(sampler: ServerSampler) -> Callable[[], list[InferenceServer]]:
    """Check what the options say of the servers. What is returned connects to them, inside the loop that asks them."""
    server_class, key = _server_class(sampler.protocol), _api_key(sampler.api_key_env)
    shared = {"model": sampler.model, "api_key": key, "timeout": sampler.request_timeout}
    servers = [check_options("sampler.protocol", server_class, {"url": url, **shared}) for url in sampler.urls]
    return lambda: [server_class(**options) for options in servers]


def _server_class(protocol: str) -> Callable[..., InferenceServer]:
    if protocol != "vllm":
        return load_custom("sampler.protocol", protocol)
    try:
        from truestep.sampler.server.vllm import Vllm  # its HTTP client is an extra
    except ImportError as error:
        raise SourceError("sampler.type: server needs `pip install 'truestep[server]'`") from error
    return Vllm


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SourceError(f"sampler.api_key_env: the environment has no variable {variable}, or it is empty")
    return key
