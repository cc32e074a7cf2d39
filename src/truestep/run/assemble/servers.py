"""Makes the inference servers of a run: those that run already, and those that the run starts."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig

from truestep.config.custom import check_options, load_custom
from truestep.config.schema import Config
from truestep.config.sections import ServerSampler
from truestep.generate.servers.protocol import InferenceServer
from truestep.generate.servers.started import Engine, StartedServers, gpus_of_ranks, python_of
from truestep.rollouts.source import SourceError
from truestep.text import keep_secret


def server_maker(sampler: ServerSampler, started: StartedServers | None = None) -> Callable[[], list[InferenceServer]]:
    """Check the servers' options, and return a function that connects to the servers. The event loop calls it."""
    server_class = _server_class(sampler.protocol)
    key = secret_of("sampler.api_key_env", sampler.api_key_env) if started is None else started.key
    urls = (sampler.urls or []) if started is None else started.urls
    shared = {"model": sampler.model, "api_key": key, "timeout": sampler.request_timeout}
    servers = [check_options("sampler.protocol", server_class, {"url": url, **shared}) for url in urls]
    return lambda: [server_class(**options) for options in servers]


def _server_class(protocol: str) -> Callable[..., InferenceServer]:
    if protocol not in ("vllm", "sglang"):
        return load_custom("sampler.protocol", protocol)
    try:  # the HTTP client is an optional package
        from truestep.generate.servers.sglang import Sglang
        from truestep.generate.servers.vllm import Vllm
    except ImportError as error:
        raise SourceError("sampler.type: server needs `pip install 'truestep[server]'`") from error
    return Vllm if protocol == "vllm" else Sglang


def secret_of(option: str, variable: str | None) -> str | None:
    """Return the value of an environment variable that an option names, and register it as a secret, so that no output
    shows it."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SourceError(f"{option}: the environment has no variable {variable}, or it is empty")
    keep_secret(key)
    return key


def engine_to_start(config: Config, model: str | None = None) -> tuple[Engine, list[list[int]]] | None:
    """Return the engine of `sampler.start` and the GPUs of each of its servers; raise if they cannot be started.
    `model`: the directory of the weights that they begin with, by default model.path."""
    sampler = config.sampler
    if not isinstance(sampler, ServerSampler) or sampler.start is None:
        return None
    start = sampler.start
    on_gpus = config.model.device != "cpu" and torch.cuda.is_available()
    if on_gpus and start.gpus is None:
        raise SourceError(
            "sampler.start.gpus: the trainer runs on a GPU, which a server would take too: say which GPUs servers get"
        )
    both = sorted(gpus_of_ranks(os.environ) & set(start.gpus or ())) if on_gpus else []
    if both:
        raise SourceError(
            f"sampler.start.gpus: GPU {', '.join(map(str, both))} is one on which the trainer runs: a server fills a "
            "GPU with its cache. Name others, or set CUDA_VISIBLE_DEVICES for the trainer"
        )
    engine = Engine(
        python=python_of(start.environment),
        kind=sampler.protocol,
        model=str(Path(model or config.model.path).absolute()),
        name=sampler.model,
        dtype=config.model.dtype,
        longest=_longest(config),
        tensor=start.tensor,
        adapter_rank=config.adapter.rank if config.adapter is not None and sampler.adapter == "served" else None,
        receives=sampler.transfer == "nccl",
        returns_routes=config.model.experts.replay == "require",
        options=tuple(start.options or ()),
    )
    gpus = start.gpus or []
    parts = [gpus[first : first + start.tensor] for first in range(0, len(gpus), start.tensor)]
    return engine, parts or [[]]


def _longest(config: Config) -> int:
    """Return the most tokens that a document may have, at most those of a micro-batch."""
    longest = config.data.tokens_per_microbatch
    allowed = getattr(AutoConfig.from_pretrained(config.model.path).get_text_config(), "max_position_embeddings", None)
    return min(longest, allowed) if isinstance(allowed, int) and allowed > 0 else longest


def start_servers(config: Config, model: str, run: Path, say: Callable[[str], None]) -> StartedServers | None:
    """Begin to start the servers of `sampler.start`. `wait_for` waits until they answer."""
    found = engine_to_start(config, model)
    if found is None:
        return None
    assert isinstance(config.sampler, ServerSampler) and config.sampler.start is not None
    return StartedServers(*found, run / "servers", say, config.sampler.start.timeout)


def wait_for(started: StartedServers | None) -> None:
    if started is not None:
        started.wait(_lives)


def _lives(url: str) -> bool:
    from truestep.generate.servers.http import answers  # the HTTP client is an optional package

    return answers(f"{url}/health")
