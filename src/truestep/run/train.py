"""Builds a trainer from a configuration, restores its last checkpoint, and runs its loop."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError

from truestep.config.load import dump_config
from truestep.config.schema import Config
from truestep.environments.printed import PrintedLog
from truestep.files.whole import read_json_lines
from truestep.generate.servers.started import StartedServers
from truestep.metrics.best import Best
from truestep.metrics.sinks import Sink
from truestep.model.policy import Policy
from truestep.plan.exhausted import exhaustion_explained
from truestep.plan.rates import Rates, rates_here
from truestep.plan.room import too_small
from truestep.plan.search import settle_on
from truestep.process.randomness import seed_random
from truestep.ranks.elastic import SECONDS_TO_STOP, find_agent, unknown_launcher
from truestep.ranks.group import ALONE, Ranks, leave
from truestep.ranks.watch import Watch
from truestep.report.verdicts.watching import Watching
from truestep.rollouts.rejects import write_rejected
from truestep.rollouts.source import Source
from truestep.run.assemble.check import make_check
from truestep.run.assemble.evaluation import make_evaluator
from truestep.run.assemble.observers import keeps_records, make_observers
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.run.assemble.rewards import Raters
from truestep.run.assemble.servers import start_servers
from truestep.run.assemble.sinks import make_sinks, make_watching
from truestep.run.assemble.sources import Supply, check_inputs, make_supply
from truestep.run.assemble.step import (
    check_custom_code,
    make_annotators,
    make_learning_rate,
    make_optimizer,
    make_queue,
    make_runner,
    starts_from_first_weights,
)
from truestep.run.callbacks import Callback, Callbacks, Run
from truestep.run.checkpoint.comparison import find_damage_together
from truestep.run.checkpoint.memory import MemoryStore, Recalled
from truestep.run.checkpoint.saves import SaveRule, Saves
from truestep.run.checkpoint.staging import SharedStaging
from truestep.run.checkpoint.store import CheckpointStore, Progress, read_progress
from truestep.run.directory import RunDirectory
from truestep.run.elastic import JOIN_PATIENCE, Elastic, check_elastic
from truestep.run.notes import options_before, run_notes, what_runs
from truestep.run.terminal.display import Display
from truestep.run.trainer import Evaluates, RunState, Trainer, TrainingError
from truestep.step.before.annotators import Annotators
from truestep.step.before.check import SamplerCheck
from truestep.step.compute.runner import StepRunner
from truestep.step.learner import Learner
from truestep.step.plan.ahead import PlansAhead
from truestep.step.plan.queue import PlanQueue
from truestep.step.update.optimizer import StateError, restore_optimizer
from truestep.text import keep_secrets_of, printable, shown
from truestep.types import Rejected
from truestep.weights.digests import Trace
from truestep.weights.errors import ModelError, RuinedError
from truestep.weights.remote_parts import from_keepers
from truestep.weights.tensor_parts import StoredTensors

# The exceptions that a damaged checkpoint can raise when it is read.
ODD_CONTENT = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError)


class DamagedError(TrainingError):
    """A checkpoint that cannot be read."""


def train(
    config: Config,
    console: Console,
    title: str = "training",
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
) -> Trainer:
    """Train to the end and return the trainer. Only the first rank calls callbacks and writes to sinks."""
    elastic = _elastic(config)
    with nullcontext() if elastic is None else elastic.ending():
        trainer = _train(config, console, title, callbacks, sinks, elastic)
    if elastic is not None:
        elastic.ended(trainer.stopped_by is not None, trainer.notice)
        if trainer.stopped_by is not None:  # a launcher ends the run if its processes end without an error
            leave()
            raise SystemExit(128 + trainer.stopped_by)
    return trainer


def _elastic(config: Config) -> Elastic | None:
    """Make the `Elastic` of this rank if the run's ranks come and go; None if their number is fixed."""
    agent = find_agent()
    given = config.checkpoint
    if agent is None:
        if given.in_memory_every is not None:
            raise TrainingError(
                f"checkpoint.in_memory_every: {given.in_memory_every} keeps the state for ranks that are started "
                "again, which only torchrun with --nnodes MIN:MAX does (truestep elastic-command): leave it out, or "
                "start the run with that command"
            )
        return None
    limit = None if given.in_memory_gigabytes is None else int(given.in_memory_gigabytes * 1e9)
    return Elastic(agent, Path(given.directory or "."), keeps=given.in_memory_every is not None, limit=limit)


def _train(
    config: Config,
    console: Console,
    title: str,
    callbacks: Sequence[Callback],
    sinks: Sequence[Sink],
    elastic: Elastic | None,
) -> Trainer:
    notes: list[str] = []
    if elastic is not None:
        check_elastic(config, elastic.agent)
    elif unknown_launcher():
        notes.append("the launcher is not torchrun: the number of ranks is fixed, even if it could start fewer")
    _refuse_notice(config)
    with nullcontext() if elastic is None else elastic.connecting():
        ranks = join_ranks(config) if elastic is None else join_ranks(config, JOIN_PATIENCE, elastic.give_up)
    watch = Watch(ranks, config.schedule.stall_timeout, None if elastic is None else elastic.agent)
    with ExitStack() as watched:
        if elastic is not None:  # a rank may be lost at any time
            watched.enter_context(watch.watching())
            elastic.count_beside(ranks)
        rates = measured_rates(config, ranks, notes)
        running, switched_on = settle_on(as_it_runs(config, ranks.share(lambda: _latest(config))), ranks, rates)
        config = with_model(running, config.model.path)
        display = Display(console) if config.logging.console and ranks.first else Display(Console(quiet=True))
        for name, value in switched_on.items():
            display.say(f"auto: {name} is {str(value).lower()} here, so that it fits or is faster")
        for note in notes:
            display.say(note)
        warning = too_small(running, ranks.size) if config.logging.console and ranks.first else None
        if warning is not None:
            display.say(f"warning: {warning}")
        if elastic is None:
            watched.enter_context(watch.watching())
        with exhaustion_explained(running, ranks.size, lambda: watch.doing), display:
            marks: dict[str, float] = {}
            if elastic is not None:
                marks, sentence = elastic.joined(ranks, watch)
                display.say(sentence)
            trainer = make_trainer(config, console, title, ranks, watch, callbacks, display, rates, elastic)
            trainer.marks = marks
            if elastic is not None:
                elastic.asked_at = lambda: trainer.state.asked_at
            display.asked_to_stop = lambda: trainer.stopped_by
            if ranks.first:
                trainer.sinks.extend([make_watching(config, trainer.directory, display), *sinks])
            trainer.run()
        shows = [sink.sentence for sink in trainer.sinks if isinstance(sink, Watching) and sink.sentence]
        display.say(". ".join([f"{trainer.ended}; the run is in {shown(trainer.directory.path)}", *shows]))
        return trainer


def _refuse_notice(config: Config) -> None:
    """Raise if the end of this machine is announced, because the run would stop at its first step."""
    notice = config.schedule.preemption_file
    if notice is not None and Path(notice).exists():
        raise TrainingError(f"schedule.preemption_file: {notice} is there already: remove it, and start again")


def measured_rates(config: Config, ranks: Ranks, notes: list[str]) -> Rates | None:
    """Return the measured rates of the machine. None with `deterministic`: two measurements differ a little, and a
    choice made from them would differ between two runs."""
    return None if config.deterministic or config.model.device == "cpu" else rates_here(ranks, notes)


def make_trainer(
    config: Config,
    console: Console,
    title: str = "training",
    ranks: Ranks = ALONE,
    watch: Watch | None = None,
    callbacks: Sequence[Callback] = (),
    display: Display | None = None,
    rates: Rates | None = None,
    elastic: Elastic | None = None,
) -> Trainer:
    display, watch = display or Display(console), watch or Watch(ranks, config.schedule.stall_timeout)
    with ExitStack() as opened:
        try:
            trainer = _make_trainer(config, title, ranks, watch, callbacks, display, rates, opened, elastic)
        except DamagedError as error:
            raise error if elastic is None or elastic.recalled is None else elastic.unreadable(error) from error
        if config.schedule.preemption_file is not None:
            trainer.notice = Path(config.schedule.preemption_file)
        opened.pop_all()  # from here on, the trainer closes what is in `opened`
    if elastic is not None and elastic.recalled is not None:
        elastic.recalled.close()
    return trainer


def _make_trainer(
    config: Config,
    title: str,
    ranks: Ranks,
    watch: Watch,
    callbacks: Sequence[Callback],
    display: Display,
    rates: Rates | None,
    opened: ExitStack,
    elastic: Elastic | None,
) -> Trainer:
    """`opened` gets what must be closed if the trainer cannot be made."""
    directory = _check(config, ranks, elastic, opened)
    store = _make_store(config, directory, ranks.share(lambda: directory.token))
    say = partial(_say_one, display, config, ranks)
    watch.phase("loading the model")
    latest, damaged = _undamaged(store, directory, ranks, None if elastic is None else elastic.recalled)
    started = _start_servers(config, ranks, latest, directory, say, opened)  # while the model is loaded
    policy = policy_of(config, ranks, latest, directory, rates)
    runner = make_runner(config, policy)
    annotators = annotators_of(config, runner, directory, latest)
    watch.phase("reading the data")
    raters = _make_raters(directory, ranks, say)
    supply, queue, check, evaluator = _make_data(config, runner, ranks, raters, say, started, directory)
    optimizer = make_optimizer(config, policy.weights)
    seed_random(config.seed)
    told = Callbacks(Run(directory.path), callbacks if ranks.first else ())
    progress = Progress(0, {}, (), 0) if latest is None else restore(latest, queue, optimizer, policy, told)
    aside = supply.source.aside()
    sinks: list[Sink] = []
    if ranks.first:
        sinks = make_sinks(config, directory, display, title, progress.step)
        begun = _begin(directory, config, policy, supply.source, latest, aside.rejected, progress, damaged)
        _say_notes(display, config, [*begun, *raters.notes])
    if latest is not None:
        _tell_again(supply, latest, progress.step, queue.documents_seen)
    runner = runner.with_entropy_bonus(progress.entropy_bonus)
    trace = Trace(policy.weights) if keeps_records(config) else None
    return Trainer(
        learner=Learner(runner, optimizer, config.optimizer.gradient_clip, trace),
        source=supply.source,
        plans=PlansAhead(queue, ranks, overlap=supply.source.plans_ahead),
        ranks=ranks,
        watch=watch,
        annotators=annotators,
        check=check,
        learning_rate=make_learning_rate(config),
        directory=directory,
        checkpoints=store,
        saves=Saves(store, ranks),
        memory=None if elastic is None else _kept_in_memory(elastic, store, say),
        save_rule=_save_rule(config, elastic is not None),
        observers=make_observers(config, directory, policy, sinks, told, supply.publication, display.say, trace),
        steps=config.schedule.steps,
        evaluator=evaluator,
        evaluate_every=config.evaluation.every if config.evaluation else 0,
        state=_state(progress, queue, _evaluated_before(config, store, directory, ranks), latest),
        put_aside=directory.not_in_ledger(aside.put_aside),
        callbacks=told,
    )


def _make_store(config: Config, directory: RunDirectory, mark: str) -> CheckpointStore:
    best = Best(config.checkpoint.keep_best)
    return CheckpointStore(directory.checkpoints, config.checkpoint.keep, best, mark, directory.check_owner)


def _kept_in_memory(elastic: Elastic, store: CheckpointStore, say: Callable[[str], None]) -> Saves | None:
    if elastic.memory is None:
        return None
    elastic.memory.say, staging = say, SharedStaging()
    return Saves(MemoryStore(elastic.memory, staging, store.latest), elastic.ranks, staging)


def _evaluated_before(config: Config, store: CheckpointStore, directory: RunDirectory, ranks: Ranks) -> int | None:
    """Tell the store which of its checkpoints is the best. Return the step before the last evaluation."""
    metric = config.checkpoint.keep_best
    if metric is not None:
        store.evaluated_before(ranks.share(lambda: Best(metric, read_json_lines(directory.evaluations)).values))
    return ranks.share(directory.last_evaluated)


def _tell_again(supply: Supply, checkpoint: Path, step: int, documents_seen: int) -> None:
    """Tell the source of the checkpoint on the disk, because the run may have been killed before it told the source.
    The source is not told of a checkpoint in memory: if a rank is lost again, the run may go on from the disk."""
    if from_keepers(checkpoint):
        return
    supply.source.checkpointed(documents_seen)
    if supply.publication is not None:
        supply.publication.saved(checkpoint, step, documents_seen)


def _start_servers(
    config: Config,
    ranks: Ranks,
    checkpoint: Path | None,
    directory: RunDirectory,
    say: Callable[[str], None],
    opened: ExitStack,
) -> StartedServers | None:
    if not ranks.first:
        return None
    base = config.model.path if checkpoint is None else directory.first_weights(config.model.path)
    started = start_servers(config, base, directory.path, say)
    if started is not None:
        opened.callback(started.close)
    return started


def _make_data(
    config: Config,
    runner: StepRunner,
    ranks: Ranks,
    raters: Raters,
    say: Callable[[str], None],
    started: StartedServers | None,
    directory: RunDirectory,
) -> tuple[Supply, PlanQueue, SamplerCheck | None, Evaluates | None]:
    policy = runner.policy
    supply = make_supply(config, policy, ranks, raters, started, directory.check_owner)
    check = make_check(config, runner, supply.servers, say)
    evaluator = make_evaluator(config, policy, raters, supply.servers, check)
    return supply, make_queue(config, policy, supply.source), check, evaluator


def _make_raters(directory: RunDirectory, ranks: Ranks, say: Callable[[str], None]) -> Raters:
    """Make the reward services. Only the first rank shows their messages and keeps the output that rewards print."""
    return Raters(say, PrintedLog(directory.printed, say, directory.owned)) if ranks.first else Raters()


def _state(progress: Progress, queue: PlanQueue, last_evaluated: int | None, latest: Path | None) -> RunState:
    saved = progress.step if latest and not from_keepers(latest) else None
    return RunState(progress.step, queue.documents_seen, last_evaluated, saved)


def _say_one(display: Display, config: Config, ranks: Ranks, note: str) -> None:
    if ranks.first:
        _say_notes(display, config, [note])


def _say_notes(display: Display, config: Config, notes: Sequence[str]) -> None:
    for note in notes if config.logging.console else ():
        display.say(shown(note))


def _check(config: Config, ranks: Ranks, elastic: Elastic | None, opened: ExitStack) -> RunDirectory:
    """Check the configuration and its inputs before the model is loaded, which can take minutes. Return the run's
    directory, locked. If a check fails, the lock is released."""
    keep_secrets_of(config.model_dump())
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    check_inputs(config, ranks)
    check_custom_code(config)
    assert config.checkpoint.directory is not None
    if elastic is not None and elastic.directory is not None:  # this directory is locked already
        return elastic.directory
    directory = RunDirectory(Path(config.checkpoint.directory), writes=ranks.first, locks=config.checkpoint.lock)
    ranks.share(directory.check)
    opened.callback(directory.unlock)
    return directory


def annotators_of(config: Config, runner: StepRunner, directory: RunDirectory, checkpoint: Path | None) -> Annotators:
    """Make the annotators of a step's plan. In a resumed run the reference model is loaded from the run's first
    weights."""
    ranks = runner.policy.weights.ranks

    def make_reference(path: str | None) -> Policy:
        began_with = config.model.path
        if path is None and checkpoint is not None:
            began_with = ranks.share(lambda: directory.first_weights(config.model.path))
        return make_policy(config, ranks, path or began_with, frozen=True)

    return make_annotators(config, runner, make_reference)


def policy_of(
    config: Config, ranks: Ranks, checkpoint: Path | None, directory: RunDirectory, rates: Rates | None
) -> Policy:
    if checkpoint is not None and config.adapter is not None:  # an adapter fits only the base model it was trained on
        base = ranks.share(lambda: directory.first_weights(config.model.path))
        config = config if base == config.model.path else config.changed({"model.path": base})
    try:
        policy = make_policy(config, ranks, None if checkpoint is None else str(checkpoint))
    except ModelError as error:  # of weights, or of options that do not fit the checkpoint, the ranks or the machine
        if checkpoint is None or not (isinstance(error, RuinedError) or from_keepers(checkpoint)):
            raise
        raise _damaged(checkpoint, error) from error
    if rates is not None:
        policy.facts = policy.facts.measured(rates.attention_slowness(config.model.attention))
    return policy


def _save_rule(config: Config, elastic: bool) -> SaveRule:
    given, source = config.checkpoint, config.data.source
    announced = source is not None and source.type != "custom"  # rollout workers load the announced checkpoints
    announced &= config.adapter is None  # a checkpoint of an adapter is in peft's format already
    nth = int(announced) if given.hugging_face_every is None else given.hugging_face_every
    grace = SECONDS_TO_STOP if elastic and given.grace is None else given.grace
    return SaveRule(given.every, nth, grace, in_memory_every=given.in_memory_every or 0)


def _undamaged(
    store: CheckpointStore, directory: RunDirectory, ranks: Ranks, recalled: Recalled | None
) -> tuple[Path | None, list[str]]:
    """Find the newest undamaged checkpoint, in memory or on the disk. Rename newer, damaged checkpoints and return a
    warning for each. A checkpoint that was kept only as the best is not used, because it may be thousands of steps
    older."""
    if recalled is not None:
        return recalled.path, []
    ranks.share(lambda: directory.lock() if directory.path.exists() else None)
    said: list[str] = []
    newest = ranks.share(store.newest)
    while (latest := ranks.share(store.latest)) is not None:
        damage = find_damage_together(latest, ranks)
        if damage is None:
            break
        before = ranks.share(partial(store.before, latest))
        if before is None or (store.keeps_best and before not in newest):
            raise _damaged(latest, damage)
        kept = ranks.share(partial(store.put_aside, latest))
        said.append(
            f"warning: the checkpoint {latest} is damaged: {printable(damage)}. The run goes on from {before}, and "
            f"the damaged one is kept as {kept}"
        )
    return latest, said


def restore(
    checkpoint: Path, queue: PlanQueue, optimizer: torch.optim.Optimizer, policy: Policy, callbacks: Callbacks
) -> Progress:
    """Restore the plan queue, the optimizer and the callbacks from a checkpoint; return its progress."""
    try:
        progress = read_progress(checkpoint, policy.weights.ranks.rank)
        queue.restore(progress.queue, list(progress.carried))
        restore_optimizer(optimizer, policy.weights, StoredTensors(checkpoint))
    except StateError as error:
        raise _damaged(checkpoint, error) from error
    except ODD_CONTENT as error:
        raise _damaged(checkpoint, f"{type(error).__name__}: {error}") from error
    callbacks.restore(progress.callbacks, progress.step, queue.documents_seen)
    return progress


def _damaged(checkpoint: Path, problem: object) -> DamagedError:
    if from_keepers(checkpoint):
        return DamagedError(printable(problem))
    before = CheckpointStore(checkpoint.parent, 1).before(checkpoint)
    goes_on = (
        "starts again from its beginning: it has no other checkpoint" if before is None else f"goes on from {before}"
    )
    return DamagedError(
        f"the checkpoint {checkpoint} cannot be read: {printable(problem)}. Without it the run {goes_on}. For that, "
        "remove that directory and start again"
    )


def _begin(
    directory: RunDirectory,
    config: Config,
    policy: Policy,
    source: Source,
    latest: Path | None,
    rejected: Sequence[Rejected],
    progress: Progress,
    damaged: Sequence[str],
) -> list[str]:
    """Roll the run's files back to the checkpoint. Called after all other parts are built, so that a start that fails
    writes nothing. Return notes, a sentence each: what runs, what changed, and which files are damaged."""
    before = None if latest is None else options_before(directory, progress.step)
    notes = what_runs(as_it_runs(config, latest), policy, directory, source, policy.weights.ranks.size)
    notes += [*damaged, *run_notes(directory, config, policy, source, rejected, latest, progress.step, before)]
    directory.lock()
    notes += directory.roll_back(progress.step, progress.rejected_bytes, progress.ledger_bytes)
    if config.data.path is not None:
        write_rejected(directory.path, rejected)  # every start reads and checks all rollout files again
    if progress.step == 0 and (config.adapter is not None or starts_from_first_weights(config)):
        directory.note_first_weights(config.model.path)
    if before is not None and config.adapter is None:  # the weights come from the checkpoint: keep the old model.path
        config = with_model(config, before.model.path)
    directory.begin_under(dump_config(config, without_secrets=True), progress.step)
    return notes


def _latest(config: Config) -> Path | None:
    directory = config.checkpoint.directory
    return None if directory is None else CheckpointStore(RunDirectory(Path(directory)).checkpoints, 1).latest()


def as_it_runs(config: Config, checkpoint: Path | None) -> Config:
    """Return the configuration with the model that is loaded: in a resumed run, the checkpoint."""
    whole = checkpoint is not None and config.adapter is None
    return with_model(config, str(checkpoint)) if whole else config


def with_model(config: Config, path: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
