"""Makes a trainer of a configuration, puts it where its last checkpoint left it, and starts its loop."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError

from truestep.assemble.evaluation import make_evaluator
from truestep.assemble.policy import join_ranks, make_policy
from truestep.assemble.sinks import make_sinks
from truestep.assemble.sources import check_inputs, make_source
from truestep.assemble.step import check_custom_code, make_learning_rate, make_optimizer, make_queue, make_runner
from truestep.checkpoint.store import CheckpointStore, read_progress
from truestep.config.load import dump_config
from truestep.config.schema import Config
from truestep.files import write_whole
from truestep.metrics.sinks import Sink
from truestep.policy.errors import ModelError
from truestep.policy.policy import Policy
from truestep.randomness import seed_random
from truestep.ranks.group import ALONE, Ranks
from truestep.ranks.watch import Watch
from truestep.rollouts.rejects import write_rejected
from truestep.run_directory import RunDirectory
from truestep.run_notes import run_notes
from truestep.step.ahead import PlansAhead
from truestep.step.optimizer import restore_optimizer
from truestep.step.queue import PlanQueue
from truestep.trainer import RunState, Trainer, TrainingError
from truestep.types import Rejected


def train(config: Config, console: Console, title: str = "training") -> Trainer:
    """Train to the end, and return the trainer that did it."""
    ranks = join_ranks(config)
    watch = Watch(ranks, config.schedule.stall_timeout)
    with watch.watching():
        trainer = make_trainer(config, console, title, ranks, watch)
        try:
            ended = trainer.run()
        finally:
            for sink in trainer.sinks:
                sink.close()
    if config.logging.console and ranks.first:
        text = f"{ended}; the run is in {trainer.directory.path}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return trainer


def make_trainer(
    config: Config, console: Console, title: str = "training", ranks: Ranks = ALONE, watch: Watch | None = None
) -> Trainer:
    watch = watch or Watch(ranks, config.schedule.stall_timeout)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    check_inputs(config, ranks)
    check_custom_code(config)
    assert config.checkpoint.directory is not None
    directory = RunDirectory(Path(config.checkpoint.directory), writes=ranks.first)
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
    latest = ranks.share(lambda: _latest(directory, store))
    watch.phase("loading the model")
    policy = _policy_of(config, ranks, latest)
    watch.phase("reading the data")
    source = make_source(config, policy, ranks)
    queue = make_queue(config, policy, source)
    optimizer = make_optimizer(config, policy.weights)
    evaluator = make_evaluator(config, policy)
    seed_random(config.seed)
    step, rejected_lines = (0, 0) if latest is None else _restore(latest, queue, optimizer, policy)
    rejected = source.drain_rejected()
    sinks: list[Sink] = []
    if ranks.first:
        notes = run_notes(directory, config, policy, source, rejected, latest, step)
        sinks = make_sinks(config, directory, console, title, step)
        directory.lock()
        for note in notes if config.logging.console else ():
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    _lay_out(directory, config, rejected, step, rejected_lines)
    if latest is not None:  # a kill may have come after its completion, and before the source was told
        source.checkpointed(latest, step, queue.documents_seen)
    return Trainer(
        policy=policy,
        source=source,
        plans=PlansAhead(queue, ranks, overlap=source.plans_ahead),
        ranks=ranks,
        watch=watch,
        runner=make_runner(config, policy),
        optimizer=optimizer,
        learning_rate=make_learning_rate(config),
        gradient_clip=config.optimizer.gradient_clip,
        directory=directory,
        checkpoints=store,
        checkpoint_every=config.checkpoint.every,
        sinks=sinks,
        steps=config.schedule.steps,
        evaluator=evaluator,
        evaluate_every=config.evaluation.every if config.evaluation else 0,
        state=RunState(step, queue.documents_seen, ranks.share(directory.last_evaluated)),
        put_aside=directory.not_in_ledger(source.drain_put_aside()),
    )


def _latest(directory: RunDirectory, store: CheckpointStore) -> Path | None:
    if directory.path.exists():  # before its checkpoints are looked at; a new one is made when all else could be
        directory.lock()
    return store.latest()


def _policy_of(config: Config, ranks: Ranks, checkpoint: Path | None) -> Policy:
    try:
        return make_policy(config, ranks, None if checkpoint is None else str(checkpoint))
    except ModelError as error:
        raise error if checkpoint is None else _damaged(checkpoint, error) from error


def _restore(checkpoint: Path, queue: PlanQueue, optimizer: torch.optim.Optimizer, policy: Policy) -> tuple[int, int]:
    """Put the run back to where the checkpoint left it; return its step, and how many records were rejected by then."""
    try:
        progress = read_progress(checkpoint)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _damaged(checkpoint, error) from error
    queue.restore(progress.queue, list(progress.carried))
    restore_optimizer(optimizer, policy.weights, progress.optimizer)
    return progress.step, progress.rejected_lines


def _damaged(checkpoint: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"the checkpoint {checkpoint} cannot be read: {error}. Without it the run goes on from the one before: remove "
        "that directory and start again"
    )


def _lay_out(
    directory: RunDirectory, config: Config, rejected: Sequence[Rejected], step: int, rejected_lines: int
) -> None:
    """Roll the run's files back to the end of `step`. Nothing is written before everything else could be built."""
    if not directory.writes:
        return
    directory.roll_back(step, rejected_lines)
    if config.data.path is not None:
        write_rejected(directory.path, rejected)  # of the whole data, read anew at every start
    write_whole(directory.config, dump_config(config).encode())
