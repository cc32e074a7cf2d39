"""Makes a trainer that makes steps of a run again, from its checkpoint, its ledger and its kept records."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from truestep.config.load import dump_config
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files.whole import lines_by_step, write_json_lines
from truestep.metrics.observers import Observer, Observers
from truestep.metrics.sinks import JsonLines, Sinks
from truestep.model.policy import Policy
from truestep.plan.search import settle_on
from truestep.process.randomness import seed_random
from truestep.ranks.group import Ranks
from truestep.ranks.watch import Watch
from truestep.rollouts.digests import digests_of
from truestep.rollouts.documents import record_lines
from truestep.rollouts.kept.records import Block, blocks_of
from truestep.rollouts.source import StillSource, Taken
from truestep.run.assemble.step import (
    computes_reference,
    make_learning_rate,
    make_optimizer,
    make_queue,
    make_runner,
    needs_logprobs,
    other_annotators,
)
from truestep.run.callbacks import Callbacks, Run
from truestep.run.checkpoint.comparison import find_damage_together
from truestep.run.checkpoint.saves import SaveRule, Saves
from truestep.run.checkpoint.store import CheckpointStore, Progress, step_of
from truestep.run.directory import RunDirectory
from truestep.run.train import (
    ODD_CONTENT,
    annotators_of,
    as_it_runs,
    measured_rates,
    policy_of,
    restore,
    with_model,
)
from truestep.run.trainer import RunState, Trainer
from truestep.run.weight_lines import WeightLines, made_by
from truestep.step.before.annotators import Annotator, Annotators
from truestep.step.compute.runner import StepRunner
from truestep.step.learner import Learner
from truestep.step.plan.ahead import PlansAhead
from truestep.step.update.optimizer import LearningRate
from truestep.text import printable
from truestep.types import DocumentScore, Rollout, StepPlan
from truestep.weights.digests import Trace

DOCUMENTS = "documents.jsonl"
_HOW_TO_KEEP = "logging.rollouts.documents: all keeps them, from the start of the run or from a restart on"


class ReplayError(TruestepError):
    """A step that cannot be made again; the message says what is missing."""


class KeptSource(StillSource):
    """The documents of a run's steps, as they were kept."""

    def __init__(self, steps: Sequence[Sequence[Rollout]]):
        self._steps = list(steps)

    def take_step(self) -> Taken | None:
        return Taken(self._steps.pop(0)) if self._steps else None

    def take(self, count: int, documents_seen: int) -> Taken:
        return self.take_step() or Taken()

    def aside(self) -> Taken:
        return Taken()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing: replayed steps begin after the checkpoint."""


@dataclass(frozen=True)
class RecordedRates(LearningRate):
    """The learning rates that the run noted, which callbacks may have changed."""

    recorded: Mapping[int, float] = field(default_factory=dict)

    def at(self, step: int) -> float:
        return self.recorded[step]


class KeptReference(Annotator):
    """The reference's log-probs that the run computed and kept in its records."""

    fields = ("reference_logprobs",)


class DocumentLines(Observer):
    """Writes the documents of the last step as a rollout file, with the policy's log-probs and entropies beside."""

    def __init__(self, directory: RunDirectory, step: int):
        self._directory, self._step = directory, step

    def wanted(self, plan: StepPlan) -> Collection[int]:
        return range(len(plan.documents))

    def trained(self, step: int, plan: StepPlan, scores: Sequence[DocumentScore]) -> None:
        if step == self._step and self._directory.writes:
            known = {score.id: score for score in scores}
            lines = [line for one in plan.documents for line in record_lines(one, known.get(one.id))]
            write_json_lines(self._directory.path / DOCUMENTS, lines)


@dataclass(frozen=True)
class Past:
    """What a run has kept of the steps up to `step`."""

    directory: RunDirectory
    step: int
    checkpoint: Path | None  # the newest before the step; None: the run's beginning
    ledger: Mapping[int, Mapping[str, Any]]

    @staticmethod
    def of(run: Path, step: int) -> "Past":
        directory = RunDirectory(run, writes=False)
        ledger = directory.read_steps()
        if not ledger:
            raise ReplayError(
                f"{run} is not the directory of a run that made steps: it has no ledger.jsonl with a step. Name the "
                "run's checkpoint.directory"
            )
        if step not in ledger:
            raise ReplayError(f"{run} has no step {step}: its ledger has steps {min(ledger)} to {max(ledger)}")
        found = [path for path in CheckpointStore(directory.checkpoints, 1).complete() if step_of(path) < step]
        return Past(directory, step, found[-1] if found else None, ledger)

    @property
    def begins(self) -> int:
        """The step that the checkpoint was written after; 0 at the run's beginning."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def steps(self) -> range:
        """The steps that are made again."""
        return range(self.begins + 1, self.step + 1)

    def records(self, original: Config, repeats_left: int) -> list[list[Rollout]]:
        """Read the documents of the steps that took new documents, and compare each with its digest in the ledger."""
        updates = original.schedule.updates_per_batch
        first = self.begins + 1 + repeats_left
        needed = [step for step in self.steps if step >= first and (step - first) % updates == 0]
        blocks = {block.step: block for block in blocks_of(self.directory.records)}
        missing = [step for step in needed if step not in blocks]
        if missing:
            raise ReplayError(self._missing(missing, bool(blocks)))
        if unknown := [step for step in needed if step not in self.ledger]:
            raise ReplayError(
                f"{self.directory.ledger} has no undamaged line of step {unknown[0]}, which names its documents. Step "
                f"{self.step} is made again from step {first} on; only steps after a later checkpoint do not need it"
            )
        return [self._checked(blocks[step], computes_reference(original)) for step in needed]

    def _missing(self, steps: Sequence[int], some: bool) -> str:
        which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        before = f"Step {self.step} is made again from " + (
            "the run's beginning, because the run kept no checkpoint before it (checkpoint.keep)"
            if self.checkpoint is None
            else f"the checkpoint after step {self.begins}"
        )
        why = "are not kept any more, or damaged" if some else "were not kept"
        return f"the records of {which} {why} in {self.directory.records}: {_HOW_TO_KEEP}. {before}"

    def _checked(self, block: Block, own_reference: bool) -> list[Rollout]:
        documents, line = block.read(), self.ledger[block.step]
        names = [document.id for document in documents]
        if names != line["documents"]:
            raise ReplayError(f"the records of step {block.step} in {block.file} are not the documents of the ledger")
        noted = line.get("digests") or [None] * len(documents)
        for name, was, now in zip(names, noted, digests_of(documents, own_reference), strict=True):
            if was is not None and was != now:
                what = "tokens or labels" if was[:8] != now[:8] else "values, such as log-probs or advantages,"
                raise ReplayError(
                    f"the record of document {printable(name)} of step {block.step} has other {what} than the step "
                    f"trained on: its digest is {now}, and that of the ledger {was}"
                )
        return documents


@dataclass(frozen=True)
class Made:
    """A trainer that makes steps again, and facts about its beginning."""

    trainer: Trainer
    digests: Mapping[str, int]  # of the weights before the first of these steps
    digests_of: str  # "weights", or "copies" of weights that are kept on the host
    damage: str | None = None  # what checksums show about the checkpoint's files; None: no damage


def make_again(past: Past, original: Config, changed: Config, output: Path, ranks: Ranks, watch: Watch) -> Made:
    """Make the trainer of the steps `past.steps`, which writes to `output`. `original`: the options of the step.
    `changed`: the options with which it is made again. Every rank calls this."""
    damage = None if past.checkpoint is None else find_damage_together(past.checkpoint, ranks)
    with blaming(past, damage):
        return replace(_make_again(past, original, changed, output, ranks, watch), damage=damage)


@contextmanager
def blaming(past: Past, damage: str | None) -> Iterator[None]:
    """If the checkpoint is damaged, name the damage in an error that may follow from it."""
    try:
        yield
    except ReplayError:
        raise
    except (TruestepError, *ODD_CONTENT) as error:
        if damage is None:
            raise
        raise ReplayError(
            f"the checkpoint {past.checkpoint} is damaged, and step {past.step} is made again from it: {damage}. "
            "If you move it elsewhere, an older one is used, or the run's beginning"
        ) from error


def _make_again(past: Past, original: Config, changed: Config, output: Path, ranks: Ranks, watch: Watch) -> Made:
    if changed.deterministic:
        torch.use_deterministic_algorithms(True)
    rates = measured_rates(changed, ranks, [])
    running, _ = settle_on(as_it_runs(changed, past.checkpoint), ranks, rates)
    config = with_model(running, changed.model.path)
    watch.phase("loading the model")
    policy = policy_of(config, ranks, past.checkpoint, past.directory, rates)
    runner = make_runner(config, policy)
    source = KeptSource(())
    queue, optimizer = make_queue(config, policy, source), make_optimizer(config, policy.weights)
    seed_random(config.seed)
    told = Callbacks(Run(output))
    progress = Progress(0, {}, (), 0)
    if past.checkpoint is not None:
        progress = restore(past.checkpoint, queue, optimizer, policy, told)
    repeats_left = progress.queue.get("repeats_left", 0)
    watch.phase("reading the records")
    steps = ranks.share(lambda: past.records(original, repeats_left))
    kept = _keeps_reference(original, config)
    source._steps += [[_adapted(document, kept, config) for document in documents] for documents in steps]
    annotators = _annotators(config, runner, past, kept)
    trace = Trace(policy.weights)
    directory = RunDirectory(output, writes=ranks.first)
    if ranks.first:
        directory.begin_under(dump_config(config, without_secrets=True), 0)
    rate = _rate(past, original, config, told)
    trainer = Trainer(
        learner=Learner(
            runner.with_entropy_bonus(progress.entropy_bonus), optimizer, config.optimizer.gradient_clip, trace
        ),
        source=source,
        plans=PlansAhead(queue, ranks, overlap=False),
        ranks=ranks,
        watch=watch,
        annotators=annotators,
        learning_rate=rate,
        directory=directory,
        checkpoints=CheckpointStore(directory.checkpoints, 1),
        saves=Saves(CheckpointStore(directory.checkpoints, 1), ranks),
        save_rule=SaveRule(never=True),
        observers=_observers(config, directory, policy, trace, told, past.step),
        steps=past.step,
        state=RunState(progress.step, queue.documents_seen),
        callbacks=told,
    )
    return Made(trainer, trace.now(), made_by(config, policy)["digests_of"])


def _observers(
    config: Config, directory: RunDirectory, policy: Policy, trace: Trace, callbacks: Callbacks, step: int
) -> Observers:
    sinks = Sinks([JsonLines(directory.metrics)] if directory.writes else [])
    lines = WeightLines(directory, trace, made_by(config, policy))
    return Observers([lines, DocumentLines(directory, step), sinks, callbacks])


def _keeps_reference(original: Config, config: Config) -> bool:
    """Tell whether the records have the reference's log-probs that the step needs."""
    mine, theirs = (getattr(one.loss, "kl_reference", None) for one in (config, original))
    return computes_reference(original) and mine is not None and theirs is not None and mine.path == theirs.path


def _adapted(document: Rollout, keeps_reference: bool, config: Config) -> Rollout:
    """Remove the reference's log-probs if the step computes them again, and check that the document has what the loss
    needs."""
    if computes_reference(config) and not keeps_reference:
        document = replace(document, reference_logprobs=None)
    lacks = [
        what
        for what, needed, there in (
            ("log-probs", needs_logprobs(config), document.logprobs is not None),
            ("advantages", not config.loss.supervised, document.advantages is not None),
        )
        if needed and not there and document.num_labels
    ]
    if lacks:
        raise ReplayError(
            f"loss.type: {config.loss.type} needs {lacks[0]}, and the record of document {printable(document.id)} has "
            "none, because the run needed none"
        )
    return document


def _annotators(config: Config, runner: StepRunner, past: Past, keeps_reference: bool) -> Annotators:
    if not keeps_reference:
        return annotators_of(config, runner, past.directory, past.checkpoint)
    return Annotators([KeptReference(), *other_annotators(config)])


def _rate(past: Past, original: Config, config: Config, callbacks: Callbacks) -> LearningRate:
    """Return the rates that the run noted, or those of the options if these are changed or the run noted none."""
    planned = make_learning_rate(config)
    lines = lines_by_step(past.directory.metrics)
    recorded = {step: lines[step]["learning_rate"] for step in past.steps if "learning_rate" in lines.get(step, {})}
    if planned != make_learning_rate(original) or len(recorded) < len(past.steps):
        return planned
    callbacks.run.learning_rate_factor = callbacks.applied_factor = 1.0  # recorded learning rates include it
    options = (planned.peak, planned.schedule, planned.warmup_steps, planned.minimum, planned.steps)
    return RecordedRates(*options, recorded)
