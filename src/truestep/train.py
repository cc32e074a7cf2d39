"""A configuration into a trainer that stands where its last checkpoint left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError

from truestep import assemble
from truestep.checkpoint.store import CheckpointStore, Progress, read_progress
from truestep.config.load import ConfigError, dump_config, load_config
from truestep.config.schema import Config
from truestep.config.sections import ServerSampler
from truestep.environments.prompts import find_prompts, load_prompts
from truestep.environments.rewards import load_reward
from truestep.files import read_json_lines, write_whole
from truestep.metrics.sinks import ConsoleSink, JsonLines, Sink, TensorBoardSink, WandbSink
from truestep.policy.errors import ModelError
from truestep.policy.policy import Policy
from truestep.randomness import seed_random
from truestep.ranks.group import ALONE, Ranks
from truestep.ranks.watch import Watch
from truestep.rollouts.check import reason_kind
from truestep.rollouts.parts import PartedSource
from truestep.rollouts.rejects import write_rejected
from truestep.rollouts.shared import SharedSource
from truestep.rollouts.source import FileSource, Source
from truestep.run_directory import RunDirectory
from truestep.sampler.decode import DecodeOptions
from truestep.sampler.evaluate import Evaluator
from truestep.sampler.in_process import InProcessSource, stop_ids
from truestep.step.ahead import PlansAhead
from truestep.step.optimizer import make_adamw, restore_optimizer
from truestep.step.queue import PlanQueue
from truestep.trainer import Trainer, TrainingError
from truestep.types import Rejected


def train(config: Config, console: Console, title: str = "training") -> Trainer:
    """Train to the end; the trainer that did it."""
    ranks = assemble.join_ranks(config)
    watch = Watch(ranks, config.schedule.stall_timeout)
    with watch.watching():
        trainer = make_trainer(config, console, title, ranks, watch)
        try:
            ended = trainer.run()
        finally:
            for sink in trainer.sinks:
                sink.close()
    if config.logging.console and ranks.first:
        where = f"the run is in {trainer.directory.path}"
        console.print(f"{ended}; {where}", highlight=False, markup=False, soft_wrap=True)
    return trainer


def make_trainer(
    config: Config, console: Console, title: str = "training", ranks: Ranks = ALONE, watch: Watch | None = None
) -> Trainer:
    watch = watch or Watch(ranks, config.schedule.stall_timeout)
    if config.deterministic:
        assemble.make_deterministic()
    if config.data.path is None and config.data.source is None and config.sampler is None:
        raise TrainingError(
            "documents come from data.path (rollout files), from data.source (sent while the run goes on) or from a "
            "sampler: give one of them"
        )
    _check_inputs(config, ranks)
    assert config.checkpoint.directory is not None
    directory = RunDirectory(Path(config.checkpoint.directory), writes=ranks.first)
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
    latest = ranks.share(lambda: _latest(directory, store))
    watch.phase("loading the model")
    policy = _policy_of(config, ranks, latest)
    watch.phase("reading the data")
    source = _make_source(config, policy, ranks)
    queue = PlanQueue(
        source,
        assemble.make_rule(config, policy),
        updates_per_batch=config.schedule.updates_per_batch,
        drop_last=config.schedule.last_step == "drop",
    )
    optimizer = make_adamw(
        policy.weights,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        epsilon=config.optimizer.epsilon,
        weight_decay=config.optimizer.weight_decay,
    )
    evaluator = _make_evaluator(config, policy)
    step, rejected_lines = 0, 0
    seed_random(config.seed)
    if latest is not None:
        progress = _progress_of(latest)
        queue.restore(progress.queue, list(progress.carried))
        restore_optimizer(optimizer, policy.weights, progress.optimizer)
        step, rejected_lines = progress.step, progress.rejected_lines
    rejected = source.drain_rejected() if source.finite else []
    sinks: list[Sink] = []
    if ranks.first:
        notes = _notes(directory, config, policy, source, rejected, latest, step)
        sinks = _make_sinks(config, directory, console, title, step)
        directory.lock()
        for note in notes if config.logging.console else ():
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    _lay_out(directory, config, source, rejected, step, rejected_lines)
    if latest is not None:  # a kill may have come between its completion and the word of it
        source.checkpointed(latest, step, queue.documents_seen)
    return Trainer(
        policy=policy,
        source=source,
        plans=PlansAhead(queue, ranks, overlap=source.finite and config.data.source is None),
        ranks=ranks,
        watch=watch,
        documents_seen=queue.documents_seen,
        runner=assemble.make_runner(config, policy),
        optimizer=optimizer,
        learning_rate=assemble.make_learning_rate(config),
        gradient_clip=config.optimizer.gradient_clip,
        directory=directory,
        checkpoints=store,
        checkpoint_every=config.checkpoint.every,
        sinks=sinks,
        steps=config.schedule.steps,
        evaluator=evaluator,
        evaluate_every=config.evaluation.every if config.evaluation else 0,
        step=step,
        last_evaluated=ranks.share(directory.last_evaluated),
    )


def _latest(directory: RunDirectory, store: CheckpointStore) -> Path | None:
    if directory.path.exists():  # before its checkpoints are looked at; a new one is made when all else could be
        directory.lock()
    return store.latest()


def _check_inputs(config: Config, ranks: Ranks) -> None:
    """What can be wrong without the model, before the minutes that a large one takes to load."""
    if isinstance(config.sampler, ServerSampler) and ranks.shards > 1:
        raise TrainingError(
            f"sampler.type: server needs a rank that has all weights: set parallel.data_shard: 1 and "
            f"parallel.data_replicate: {ranks.size} (this version syncs no sharded weights to servers)"
        )
    if config.data.path is not None:
        assemble.data_paths(config, ranks.data_rank)
    if config.data.source is not None and ranks.first:
        assemble.make_transport(config.data.source).close()
    for section in (config.sampler, config.evaluation):
        if section is not None:
            find_prompts(section.prompts)
            if section.reward is not None:
                load_reward(section.reward)


def _policy_of(config: Config, ranks: Ranks, checkpoint: Path | None) -> Policy:
    try:
        return assemble.make_policy(config, ranks, None if checkpoint is None else str(checkpoint))
    except ModelError as error:
        raise error if checkpoint is None else _damaged(checkpoint, error) from error


def _progress_of(checkpoint: Path) -> Progress:
    try:
        return read_progress(checkpoint)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _damaged(checkpoint, error) from error


def _damaged(checkpoint: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"the checkpoint {checkpoint} cannot be read: {error}. Without it the run goes on from the one before: remove "
        "that directory and start again"
    )


def _notes(
    directory: RunDirectory,
    config: Config,
    policy: Policy,
    source: Source,
    rejected: Sequence[Rejected],
    latest: Path | None,
    step: int,
) -> list[str]:
    """What somebody who starts a run wants to know before the first step."""
    notes = []
    if latest is not None:
        notes += [f"going on after step {step} of {latest}", *_changes_since(directory, config)]
    elif done := len(read_json_lines(directory.ledger)):
        notes.append(f"{directory.path} has no checkpoint: starting again, its {done} steps are removed")
    if rejected:
        kinds = Counter(reason_kind(record.reason) for record in rejected)
        reasons = "; ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
        of = f" of {len(rejected) + len(source.documents)} records" if isinstance(source, FileSource) else " records"
        notes.append(f"{len(rejected)}{of} are rejected: {reasons}; see {directory.rejected}")
    if config.sampler is not None and not stop_ids(policy):
        notes.append(
            "warning: neither the model's configuration nor its tokenizer names an end-of-text token: every completion "
            "runs to sampler.max_new_tokens"
        )
    return notes


def _changes_since(directory: RunDirectory, config: Config) -> list[str]:
    """Options that are no longer what the run was started with. They may change; nobody should be surprised."""
    try:
        before = _flat(load_config(directory.config).model_dump())
    except ConfigError:  # written by another version, or gone
        return []
    now = _flat(config.model_dump())
    notes = [
        f"{name} is now {now.get(name)}; before it was {before.get(name)}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
    if before.get("model.path") != now.get("model.path"):
        notes.append("the weights are the checkpoint's all the same: model.path is read at a run's beginning only")
    return notes


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _lay_out(
    directory: RunDirectory, config: Config, source: Source, rejected: Sequence[Rejected], step: int, lines: int
) -> None:
    """The run's files as they were at the end of `step`. Nothing is written before everything else could be built."""
    if not directory.writes:
        return
    directory.roll_back(step, lines)
    if config.data.path is not None:
        write_rejected(directory.path, rejected)  # of the whole data, read anew at every start
    write_whole(directory.config, dump_config(config).encode())


def _make_source(config: Config, policy: Policy, ranks: Ranks) -> Source:
    if config.data.source is not None:
        return assemble.make_stream_source(config, policy.vocabulary_size, ranks)
    if config.sampler is None:
        documents = assemble.read_documents(config, policy.vocabulary_size, ranks.data_rank)
        parted = assemble.own_part(config)
        if not documents.rollouts and not parted:
            reasons = "; ".join(sorted({record.reason for record in documents.rejected})[:3]) or "the files are empty"
            raise TrainingError(f"data.path: no record of {config.data.path} can be trained on: {reasons}")
        shuffle_seed = config.seed if config.data.shuffle else None
        files = FileSource(documents.rollouts, documents.rejected, config.data.epochs, shuffle_seed)
        return PartedSource(files, ranks) if parted else files
    sampler = config.sampler
    if isinstance(sampler, ServerSampler):
        from truestep.assemble_server import make_server_source  # its HTTP client is an extra

        if ranks.size == 1:
            return make_server_source(config, policy)
        # Every rank has all of the weights, so the first can write and score them alone.
        mine = make_server_source(config, policy) if ranks.first else None
        return SharedSource(mine, ranks, finite=False)
    assert config.data.group_size is not None
    return InProcessSource(
        policy=policy,
        prompts=load_prompts(sampler.prompts, policy.tokenizer, policy.vocabulary_size),
        reward=load_reward(sampler.reward),
        options=DecodeOptions(
            sampler.temperature, sampler.top_p, sampler.max_new_tokens, sampler.batch_size, stop_ids(policy)
        ),
        group_size=config.data.group_size,
        advantage_rule=config.data.advantages,
        seed=config.seed,
        max_tokens=config.data.tokens_per_microbatch,
        stop_at_rejected=config.data.on_bad_record == "stop",
    )


def _make_evaluator(config: Config, policy: Policy) -> Evaluator | None:
    evaluation, sampler = config.evaluation, config.sampler
    if evaluation is None:
        return None
    reward = evaluation.reward or (sampler and sampler.reward)
    assert reward, "a contradiction that the configuration refuses"
    max_new_tokens = evaluation.max_new_tokens or (sampler.max_new_tokens if sampler else 512)
    held_out = load_prompts(evaluation.prompts, policy.tokenizer, policy.vocabulary_size)
    options = DecodeOptions(evaluation.temperature, 1.0, max_new_tokens, evaluation.batch_size, stop_ids(policy))
    return Evaluator(
        policy=policy,
        prompts=held_out[: evaluation.max_prompts],
        reward=load_reward(reward),
        options=options,
        samples_per_prompt=evaluation.samples_per_prompt,
        seed=config.seed,
    )


def _make_sinks(config: Config, directory: RunDirectory, console: Console, title: str, done: int) -> list[Sink]:
    logging = config.logging
    sinks: list[Sink] = []
    if logging.jsonl:
        sinks.append(JsonLines(directory.metrics))
    if logging.tensorboard is not None:
        sinks.append(TensorBoardSink(logging.tensorboard, done))
    if logging.wandb is not None:
        options = logging.wandb
        sinks.append(
            WandbSink(
                directory.path,
                project=options.project,
                name=options.name,
                mode=options.mode,
                config=config.model_dump(mode="json"),
            )
        )
    if logging.console:
        sinks.append(ConsoleSink(console, steps=config.schedule.steps, done=done, title=title))
    return sinks
