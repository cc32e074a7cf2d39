"""Makes the source of documents: rollout files, a stream, the policy itself, or inference servers."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from truestep.config.custom import check_options, load_custom
from truestep.config.schema import Config, of_sets
from truestep.config.sections import (
    CustomSource,
    DirectorySource,
    InProcessSampler,
    RedisSource,
    ServerSampler,
    files_of,
)
from truestep.environments.prompts import Prompt, find_prompts, load_prompts, prompts_of_rows
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import DrawOptions
from truestep.generate.group_maker import GroupOptions
from truestep.generate.groups import check_lengths
from truestep.generate.in_process import InProcessSource
from truestep.generate.order import OrderOptions
from truestep.generate.pools import Curriculum
from truestep.generate.read import stop_ids
from truestep.generate.servers.look_ahead import StalenessLimit
from truestep.generate.servers.servers import Servers
from truestep.generate.servers.shared import SharedServers, SharedServerSource
from truestep.generate.servers.source import ServerSource
from truestep.generate.servers.started import StartedServers
from truestep.generate.servers.weight_files import Publisher, WeightsDirectory
from truestep.metrics.observers import Observer
from truestep.model.loading.read import load_tokenizer
from truestep.model.policy import Policy
from truestep.ranks.group import Ranks
from truestep.rollouts.advantages import AdvantageRule, OverlongPenalty, check_group_sizes
from truestep.rollouts.chat import ChatTemplate
from truestep.rollouts.fields import Field, declare
from truestep.rollouts.files import DataError, Documents, expand_paths
from truestep.rollouts.parts import PartedSource
from truestep.rollouts.record import Checks, Needs
from truestep.rollouts.shared import SharedPeekableSource
from truestep.rollouts.source import FileSource, Source, SourceError
from truestep.rollouts.stored import StoredDocuments, open_documents
from truestep.rollouts.stream.announcements import Announcements
from truestep.rollouts.stream.directory import DirectoryTransport
from truestep.rollouts.stream.given import GivenTransport
from truestep.rollouts.stream.ids import SeenIds
from truestep.rollouts.stream.owned import OwnedTransport
from truestep.rollouts.stream.source import StreamSource
from truestep.rollouts.stream.transport import Transport
from truestep.run.assemble.rewards import Raters, check_rewards, longest_conversation, made_rows, make_plays
from truestep.run.assemble.servers import engine_to_start, server_maker, wait_for
from truestep.run.assemble.step import needs_logprobs, takes_reference_of_records, tolerance_of
from truestep.types import PutAside, Rejected, Rollout, RouteShape

IDS_FILE = "stream_ids.bin"  # in the run's directory


def check_inputs(config: Config, ranks: Ranks) -> None:
    """Raise on wrong inputs before the model is loaded, which can take minutes."""
    data, sampler = config.data, config.sampler
    advantage_rule(config)
    declared_fields(config)
    if data.path is None and data.source is None and sampler is None:
        raise SourceError(
            "documents come from data.path (rollout files), from data.source (sent while the run goes on) or from a "
            "sampler: give one of them"
        )
    if data.path is not None:
        data_paths(config, ranks.data_rank)
    if config.evaluation is not None and config.evaluation.path is not None:
        expand_paths(config.evaluation.path)
    if data.source is not None and ranks.first:
        make_transport(data.source).close()
    asked = {"sampler": None if sampler is None else sampler.prompts}
    for name, alone in of_sets(config).items():
        section = f"evaluation.sets.{name}" if name else "evaluation"
        asked[section] = None if alone.evaluation is None else alone.evaluation.prompts
    for section, prompts in asked.items():
        for source, file in files_of(prompts).items():
            find_prompts(file, f"{section}.prompts.{source}" if source else f"{section}.prompts")
    check_rewards(config, ranks)
    if isinstance(sampler, ServerSampler) and ranks.first:
        server_maker(sampler)
        engine_to_start(config)


@dataclasses.dataclass(frozen=True)
class Supply:
    """A source of documents, the observer that publishes new weights, and the inference servers."""

    source: Source
    publication: Observer | None = None
    servers: SharedServers | None = None


def make_supply(
    config: Config,
    policy: Policy,
    ranks: Ranks,
    raters: Raters,
    started: StartedServers | None = None,
    fence: Callable[[], None] = lambda: None,
) -> Supply:
    """`fence` raises if another process trains the run."""
    if config.data.source is not None:
        return _make_stream_supply(config, policy, ranks, fence)
    if config.sampler is None:
        return Supply(_make_file_source(config, policy, ranks))
    if isinstance(config.sampler, InProcessSampler):
        return Supply(_make_in_process_source(config, config.sampler, policy, raters))
    sampler, made = config.sampler, list[tuple[ServerSource, Servers]]()
    publisher, rows = _make_publisher(config, sampler), made_rows(config, ranks, raters)
    # Only the first rank connects to the servers; an error there is raised on all ranks.
    ranks.share(lambda: made.append(_make_server_source(config, sampler, policy, raters, publisher, rows, started)))
    source, servers = made[0] if made else (None, None)
    shared = SharedServers(servers, policy, publisher, fence)
    return Supply(SharedServerSource(source, shared, policy), publication=shared, servers=shared)


def _make_file_source(config: Config, policy: Policy, ranks: Ranks) -> Source:
    vocabulary_size, tokenizer = policy.vocabulary_size, lambda: policy.tokenizer
    routes = replayed_by(config, policy)
    documents = read_documents(config, vocabulary_size, ranks.data_rank, tokenizer, routes=routes)
    parted = own_part(config)
    if not documents.rollouts and not parted:
        reasons = "; ".join(sorted({record.reason for record in documents.rejected})[:3]) or "the files are empty"
        raise DataError(f"data.path: no record of {config.data.path} can be trained on: {reasons}")
    _check_group_size(config, documents)
    shuffle_seed = config.seed if config.data.shuffle else None
    files = FileSource(
        documents.rollouts, documents.rejected, config.data.epochs, shuffle_seed, put_aside=documents.put_aside
    )
    return PartedSource(files, ranks) if parted else files


def _check_group_size(config: Config, documents: Documents) -> None:
    if config.loss.supervised or not advantage_rule(config).from_rewards:
        return
    if isinstance(documents.rollouts, StoredDocuments):
        members = documents.rollouts.group_members
    else:
        items: list[Rollout | Rejected | PutAside] = [*documents.rollouts, *documents.rejected, *documents.put_aside]
        members = list(Counter(item.group_id for item in items if item.group_id is not None).values())
    check_group_sizes(members, config.data.group_size)


def advantage_rule(config: Config) -> AdvantageRule:
    """Make the rule that turns rewards into advantages; import it if it is the user's own."""
    data, penalty = config.data, None
    if data.overlong_penalty is not None:
        bounds = data.overlong_penalty.model_dump()
        penalty = OverlongPenalty(bounds["from"], bounds["to"], bounds["weight"])
    return AdvantageRule.of(data.advantages, data.advantage_scale, data.advantage_std_floor, penalty)


def replayed_by(config: Config, policy: Policy) -> RouteShape | None:
    """Return the shape that `routed_experts` of records must have; None: they are not replayed."""
    how = config.model.experts.replay
    return None if how == "off" else replace(policy.route_shape, required=how == "require")


def asked_of_servers(config: Config, policy: Policy) -> RouteShape | None:
    """Return the shape that `routed_experts` of servers must have; None: they are not requested."""
    routes = replayed_by(config, policy)
    return routes if routes is not None and routes.experts else None


def checks_of(
    config: Config, vocabulary_size: int, tokenizer: Callable[[], Any], routes: RouteShape | None = None
) -> Checks:
    """Return what the configuration's loss requires of records. `routes`: from `replayed_by`."""
    data, supervised = config.data, config.loss.supervised
    return Checks(
        Needs(
            logprobs=needs_logprobs(config),
            advantages=not supervised,
            advantage_rule=advantage_rule(config),
            reference_logprobs=takes_reference_of_records(config),
        ),
        vocabulary_size,
        data.temperature,
        max_tokens=data.tokens_per_microbatch,
        group_size=data.group_size,
        stop_at_rejected=data.on_bad_record == "stop",
        chat=ChatTemplate(tokenizer) if supervised else None,
        truncated=data.truncated,
        fields=declared_fields(config),
        routes=routes,
    )


def declared_fields(config: Config) -> tuple[Field, ...]:
    """Make the fields that the user declares."""
    return declare(config.data.model_dump()["fields"])


def own_part(config: Config) -> bool:
    """True if data.path contains {rank}, so that each rank reads its own files."""
    path = config.data.path
    return path is not None and any("{rank}" in pattern for pattern in ([path] if isinstance(path, str) else path))


def data_paths(config: Config, rank: int) -> list[Path]:
    path = config.data.path
    assert path is not None
    patterns = [path] if isinstance(path, str) else path
    return expand_paths([pattern.replace("{rank}", str(rank)) for pattern in patterns])


def read_documents(
    config: Config,
    vocabulary_size: int,
    rank: int = 0,
    tokenizer: Callable[[], Any] | None = None,
    *,
    as_written: bool = False,
    routes: RouteShape | None = None,
) -> Documents:
    """Read the documents of data.path. Without `tokenizer`, the model's is loaded if messages need one. With
    `as_written`, rewards and advantages stay as in the files, and truncated documents are kept. `routes`: from
    `replayed_by`."""
    checks = checks_of(config, vocabulary_size, tokenizer or tokenizer_of(config), routes)
    if as_written:
        needs = dataclasses.replace(checks.needs, advantages=False)
        checks = dataclasses.replace(checks, needs=needs, truncated="keep")
    return open_documents(data_paths(config, rank), checks, _cache_directory(config))


def _cache_directory(config: Config) -> Path | None:
    cache = config.data.cache_directory
    return None if cache is None else Path(cache).expanduser()


def tokenizer_of(config: Config) -> Callable[[], Any]:
    return lambda: load_tokenizer(Path(config.model.path), config.model.trust_remote_code)


def held_out_documents(config: Config, policy: Policy) -> Documents:
    """Read the documents of evaluation.path, whole on every rank."""
    assert config.evaluation is not None and config.evaluation.path is not None
    path, routes = config.evaluation.path, replayed_by(config, policy)
    checks = checks_of(config, policy.vocabulary_size, lambda: policy.tokenizer, routes)
    checks = dataclasses.replace(checks, stop_at_rejected=False)
    return open_documents(expand_paths(path if isinstance(path, str) else list(path)), checks, _cache_directory(config))


def make_transport(source: RedisSource | DirectorySource | CustomSource) -> Transport:
    """Connect to the Redis server, the directory or the user's own source; raise if the connection fails."""
    if isinstance(source, CustomSource):
        function = load_custom("data.source.function", source.function)
        options = check_options("data.source.options", function, source.options or {})
        return GivenTransport(source.function, lambda start: function(start, **options))
    if isinstance(source, DirectorySource):
        return DirectoryTransport(Path(source.directory))
    from truestep.rollouts.stream.redis import RedisTransport  # needs the optional package redis

    return RedisTransport(
        url=source.url, stream=source.stream, group=source.group, consumer=source.consumer, events=source.events
    )


def _make_stream_supply(config: Config, policy: Policy, ranks: Ranks, fence: Callable[[], None]) -> Supply:
    data = config.data
    assert data.source is not None
    if not ranks.first:
        return Supply(SharedPeekableSource(None, ranks))
    assert config.checkpoint.directory is not None
    ids = SeenIds(Path(config.checkpoint.directory) / IDS_FILE, fence)
    checks = checks_of(config, policy.vocabulary_size, lambda: policy.tokenizer, replayed_by(config, policy))
    timeout = config.schedule.stall_timeout
    transport = OwnedTransport(make_transport(data.source), fence)
    source = StreamSource(transport, checks, timeout, ids, data.group_timeout)
    shared = source if ranks.size == 1 else SharedPeekableSource(source, ranks)
    return Supply(shared, publication=Announcements(transport))


def read_prompts(
    given: str | dict[str, Any] | None, rows: list[dict[str, Any]] | None, policy: Policy, most: int | None = None
) -> list[Prompt]:
    """Return the prompts of files, or those that the environment made; with `most`, the first ones of each."""
    if rows is not None:
        return prompts_of_rows(rows, policy.tokenizer, policy.vocabulary_size)[:most]
    return [
        prompt
        for source, file in files_of(given).items()
        for prompt in load_prompts(file, policy.tokenizer, policy.vocabulary_size, source, most)
    ]


def draw_options(sampler: InProcessSampler, policy: Policy) -> DrawOptions:
    return DrawOptions(
        temperature=sampler.temperature,
        max_new_tokens=sampler.max_new_tokens,
        stop_ids=stop_ids(policy),
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
        stop=tuple(sampler.stop or ()),
    )


def engine_settings(sampler: InProcessSampler, deterministic: bool = False) -> EngineSettings:
    longest = longest_conversation(sampler)
    return EngineSettings(sampler.batch_size, longest, sampler.engine, sampler.exact, waves=deterministic)


def _group_options(config: Config, draw: DrawOptions, check_share: float = 0.0) -> GroupOptions:
    assert config.data.group_size is not None
    stops = config.data.on_bad_record == "stop"
    return GroupOptions(
        config.data.group_size,
        config.seed,
        draw,
        stop_at_rejected=stops,
        check_share=check_share,
        order=_order_options(config),
    )


def _order_options(config: Config) -> OrderOptions:
    assert config.sampler is not None
    weights, given = config.sampler.prompt_weights or {}, config.sampler.curriculum
    curriculum = None if given is None else Curriculum(given.easy, given.hopeless, given.rest)
    return OrderOptions(weights, curriculum)


def _make_in_process_source(
    config: Config, sampler: InProcessSampler, policy: Policy, raters: Raters
) -> InProcessSource:
    plays = make_plays(config, policy, raters)
    assert plays is not None
    rows = made_rows(config, policy.weights.ranks, raters)
    return InProcessSource(
        generator=EngineGenerator(policy, engine_settings(sampler, config.deterministic)),
        prompts=read_prompts(sampler.prompts, rows, policy),
        plays=plays,
        options=_group_options(config, draw_options(sampler, policy)),
        advantage_rule=advantage_rule(config),
        max_tokens=config.data.tokens_per_microbatch,
        truncated=config.data.truncated,
        replace_limit=_replace_limit(config),
    )


def _replace_limit(config: Config) -> int:
    return config.data.replace_limit if config.data.zero_advantage == "replace" else 0


def _make_publisher(config: Config, sampler: ServerSampler) -> Publisher:
    assert config.checkpoint.directory is not None
    path = Path(sampler.weights_directory or Path(config.checkpoint.directory) / "weights")
    run = Path(config.checkpoint.directory)
    directory = WeightsDirectory(path, run=run, adapter_alone=sampler.adapter == "served")
    return Publisher(directory, getattr(torch, config.model.dtype), sends=sampler.transfer == "nccl")


def _make_server_source(
    config: Config,
    sampler: ServerSampler,
    policy: Policy,
    raters: Raters,
    publisher: Publisher,
    rows: list[dict[str, Any]] | None,
    started: StartedServers | None,
) -> tuple[ServerSource, Servers]:
    data, schedule = config.data, config.schedule
    plays = make_plays(config, policy, raters)
    assert plays is not None
    prompts = read_prompts(sampler.prompts, rows, policy)
    check_lengths(prompts, sampler.max_new_tokens, data.tokens_per_microbatch)
    draw = DrawOptions(sampler.temperature, sampler.max_new_tokens, stop_ids(policy))
    options = _group_options(config, draw, sampler.check_share if sampler.max_staleness else 0.0)
    sampling = replace(options, anew_at_once=True)
    wait_for(started)
    servers = Servers(
        prompts=prompts,
        make_servers=server_maker(sampler, started),
        started=started,
        plays=plays,
        sampling=sampling,
        vocabulary_size=policy.vocabulary_size,
        limit=StalenessLimit(
            docs_per_step=schedule.docs_per_step,
            documents_per_take=schedule.docs_per_step * schedule.updates_per_batch,
            max_staleness=sampler.max_staleness,
            concurrency=sampler.concurrency,
            stall_timeout=schedule.stall_timeout,
        ),
        publisher=publisher,
        send_from=policy.device if sampler.transfer == "nccl" else None,
        pause=sampler.pause,
        rolling=sampler.updates == "rolling",
        tolerance=tolerance_of(config),
        routes=asked_of_servers(config, policy),
    )
    source = ServerSource(
        servers,
        prompts=prompts,
        sampling=sampling,
        advantage_rule=advantage_rule(config),
        truncated=data.truncated,
        replace_limit=_replace_limit(config),
    )
    return source, servers
