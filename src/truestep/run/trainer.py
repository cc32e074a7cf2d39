"""The training loop. It calls the parts of a run in order; the computation is in those parts."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from truestep.errors import TruestepError
from truestep.metrics.observers import Observers
from truestep.metrics.sinks import Sink, Sinks
from truestep.metrics.spent import StepTimes
from truestep.metrics.types import Max
from truestep.model.policy import Policy
from truestep.process.garbage import LongLived
from truestep.ranks.group import Ranks
from truestep.ranks.watch import Watch
from truestep.rollouts.digests import REFERENCE
from truestep.rollouts.source import Interrupted, Source
from truestep.run.callbacks import Callbacks, Run
from truestep.run.checkpoint.saves import Complete, SaveRule, Saves
from truestep.run.checkpoint.store import CheckpointStore, Progress
from truestep.run.directory import RunDirectory
from truestep.step.before.annotators import Annotators
from truestep.step.before.check import SamplerCheck
from truestep.step.compute.runner import Accumulated, StepRunner
from truestep.step.gpu_use import gpu_metrics
from truestep.step.learner import Learner
from truestep.step.plan.agreement import digests_by_all
from truestep.step.plan.ahead import Planned, PlansAhead
from truestep.step.update.blame import find_cause
from truestep.step.update.gradient_clipping import explain_useless
from truestep.step.update.optimizer import LearningRate, optimizer_parts
from truestep.text import printable
from truestep.types import PutAside, Rejected, StepPlan
from truestep.weights.finite import some


class TrainingError(TruestepError):
    """The run cannot go on."""


class Evaluates(Protocol):
    def run(self, step: int, documents_seen: int, asked_to_stop: Callable[[], bool]) -> dict[str, Any]:
        """Evaluate the policy and return a line of evaluation.jsonl; raise `Interrupted` if asked to stop."""
        ...

    def close(self) -> None: ...


@dataclass
class RunState:
    """The state that steps change, besides the weights and the optimizer."""

    step: int = 0  # completed steps
    documents_seen: int = 0
    last_evaluated: int | None = None  # the step before the last evaluation
    saved: int | None = None  # the step of the last checkpoint that this start wrote or resumed from
    planned: Planned | None = None  # the plan of the last completed step
    stopped_by: int | None = None  # the number of the signal that asked the run to stop
    asked_at: float = math.inf  # `time.monotonic` when the run was first asked to stop


@dataclass
class Trainer:
    """The parts of a run, and the loop over its steps."""

    learner: Learner
    source: Source
    plans: PlansAhead
    learning_rate: LearningRate
    directory: RunDirectory
    checkpoints: CheckpointStore
    saves: Saves
    observers: Observers
    ranks: Ranks
    watch: Watch
    steps: int | None = None
    evaluator: Evaluates | None = None
    evaluate_every: int = 0
    save_rule: SaveRule = field(default_factory=SaveRule)
    state: RunState = field(default_factory=RunState)
    callbacks: Callbacks = field(default_factory=lambda: Callbacks(Run(Path())))
    put_aside: list[PutAside] = field(default_factory=list)  # documents not in the ledger yet
    annotators: Annotators = field(default_factory=Annotators)
    check: SamplerCheck | None = None
    times: StepTimes = field(default_factory=StepTimes)
    memory: Saves | None = None  # the last state in the memory of this machine and of another
    notice: Path | None = None  # a file that announces the end of this rank's machine
    marks: dict[str, float] = field(default_factory=dict)  # metrics of this generation, for each of its steps
    ended: str = "not run yet"  # how the run ended, as a sentence
    finished: bool = False  # all steps were made or the data ended: the run was not stopped
    _num_rejected: int = 0  # records rejected since the last step
    _long_lived: LongLived = field(default_factory=LongLived)

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    @property
    def runner(self) -> StepRunner:
        return self.learner.runner

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.learner.optimizer

    @property
    def sinks(self) -> list[Sink]:
        """The sinks of the run's metrics; a caller may append to this list."""
        return self.observers.of(Sinks).sinks

    @property
    def stopped_by(self) -> int | None:
        return self.state.stopped_by

    def ask_to_stop(self, number: int) -> None:
        """End the run after the current step, as the signal with this number does."""
        self.state.stopped_by = number
        self.state.asked_at = min(self.state.asked_at, time.monotonic())

    def run(self) -> str:
        """Train until the steps or the data end, or until asked to stop; return a sentence that says how it ended."""
        try:
            self.ended, self.finished = self._run()
            return self.ended
        finally:
            self._long_lived.give_back()
            try:
                self.observers.close()
            finally:
                self._close()

    def _close(self) -> None:
        try:
            # After an error on one rank, the ranks must not wait for each other.
            if self.ranks.size == 1 or self.finished:
                self.plans.close()
            self.source.close(self.finished)
            if self.evaluator is not None:
                self.evaluator.close()
            self.saves.close()
            if self.memory is not None:
                self.memory.close()
        finally:
            self.directory.unlock()  # last: a source gives back its documents only if this process still has the lock

    def _run(self) -> tuple[str, bool]:
        self.source.asked_to_stop = self._told_to_stop
        self.source.put_rejected = self._put_rejected
        self.observers.started()
        with self._stop_between_steps():
            if self.state.last_evaluated is None or self._evaluation_due():  # or an evaluation was interrupted
                self._evaluate()
            ended = self._steps()
            if ended is not None and self.state.last_evaluated != self.step:
                self._evaluate()
                if self._lacks_evaluation() and self._asked_to_stop():
                    ended = None  # the resumed run makes this evaluation
            # Agree again: a signal may have interrupted only one rank's wait, or come after the last agreement.
            signalled = ended is None and self._agree() is not None
            grace = self.save_rule.grace
            self._save_last(self.state.asked_at + grace if signalled and grace is not None else None)
        if ended is not None:
            self.state.stopped_by = None  # the signal came after the last step
        ended_by = ended or self._stopped()
        self.observers.ended(ended_by, ended is not None)
        return ended_by, ended is not None

    def _stopped(self) -> str:
        reason = self.callbacks.run.stop_reason
        by = f"stopped by a callback ({printable(reason)})"
        if self.stopped_by is not None:
            by = "stopped by Ctrl-C" if self.stopped_by == signal.SIGINT else "stopped by a signal"
            by += f" ({signal.Signals(self.stopped_by).name})"
        if not self.save_rule.never and self.state.saved != self.step:
            latest = self.ranks.share(self.checkpoints.latest)
            place = "starts again from the beginning" if latest is None else f"goes on from {latest}"
            late = f"it could not be saved within checkpoint.grace: {self.save_rule.grace:g}"
            return f"{by} after step {self.step}; {late}, so the same command {place}"
        return f"{by} after step {self.step}; the same command goes on from here"

    def _steps(self) -> str | None:
        """Make the steps; return a sentence that says how they ended, or None if the run was asked to stop."""
        while self.steps is None or self.step < self.steps:
            self.watch.phase(f"agreeing whether to make step {self.step + 1}")
            if self._asked_to_stop():
                return None
            start = time.perf_counter()
            self.watch.phase(f"waiting for the documents of step {self.step + 1}")
            try:
                planned = self.plans.next()
            except Interrupted:
                self.state.planned = self.plans.snapshot()  # the checkpoint must hold the documents read meanwhile
                return None
            waited = time.perf_counter() - start
            self.state.planned = planned
            self._put_rejected(planned.taken.rejected)
            self.put_aside += planned.taken.put_aside
            if planned.plan is None:
                self.directory.record_put_aside(self.step, self.state.documents_seen, self.put_aside)
                return self._end_of_data(planned.dropped)
            self.observers.rollouts(planned.plan.documents)
            self._train(planned.plan, start, {"data_wait_time": waited, **planned.taken.measured})
            if self._evaluation_due():
                self._evaluate()
            if self.save_rule.due(self.step) or self._is_best():
                self._save()
            elif self.save_rule.every > 0 and not self.save_rule.never:
                self._prepare(self.saves)
            if self.memory is not None:
                self._keep_in_memory(self.memory)
            self._long_lived.step_made()
        if self.steps < self.step:
            return f"the run has made {self.step} steps already, and schedule.steps is {self.steps}"
        return f"all {self.steps} steps are done"

    def _put_rejected(self, rejected: Sequence[Rejected]) -> None:
        self.directory.record_rejected(rejected)
        self._num_rejected += len(rejected)
        if rejected:
            self.observers.rejected(rejected)

    def _asked_to_stop(self) -> bool:
        """Tell whether any rank was asked to stop. All ranks get the same answer, and end after the same step."""
        return self._agree() is not None or self.callbacks.run.stop_reason is not None

    def _told_to_stop(self) -> bool:
        """Tell whether a signal or the announced end of this machine asked this rank to stop."""
        if self.stopped_by is None and self.notice is not None and self.notice.exists():
            self.ask_to_stop(signal.SIGTERM)
        return self.stopped_by is not None

    def _agree(self) -> int | None:
        """Gather stop signals, callback requests and save reports from all ranks, and act on them in the same way on
        each. Return the number of the signal that asked a rank to stop. A signal that comes during the gather counts at
        the next one."""
        self._told_to_stop()
        told = self.ranks.gather((self.stopped_by, self.callbacks.asked, self.saves.report()))
        agreed = next((number for number, *_ in told if number is not None), None)
        if agreed is not None and self.stopped_by is None:
            self.ask_to_stop(agreed)
        self.callbacks.agree(told[0][1])
        self._saved(self.saves.hear([report for *_, report in told]))
        return agreed

    def _end_of_data(self, dropped: int) -> str:
        total = f" of {self.steps}" if self.steps else ""
        note = f"; the last {dropped} documents make no whole step and were dropped" if dropped else ""
        return f"the data ended after step {self.step}{total}{note}"

    def _train(self, plan: StepPlan, start: float, measured: Mapping[str, float]) -> None:
        self.watch.phase(f"computing step {self.step + 1}")
        plan = self.annotators.annotate(plan, self.times)
        number = self.step + 1
        accumulated = self._accumulate(plan, measured)
        if (fault := self._fault(plan, accumulated)) is not None:
            raise self._unusable(number, fault)
        self.observers.computing(number, plan)  # a GPU ends its backward pass now, and `gradient_norm` waits for it
        digests = self._digests(plan)
        norm = self.learner.gradient_norm()
        # Weights that are not finite also make an unusable gradient: check them before the documents are blamed.
        useless = not self.learner.usable(norm)
        if useless or self.learner.update_check.costs_nothing:
            self._check_weights()
        if useless:
            raise self._useless(number, plan, accumulated, norm)
        self.observers.gradient(plan, accumulated, norm)
        rate = self.learning_rate.at(number) * self.callbacks.applied_factor
        self.learner.update(rate, norm, accumulated.loads, before=self._before_update)
        self.learner.runner = self.runner.steered(accumulated.metrics)
        self.state.step = number
        self.state.documents_seen = plan.documents_seen_after
        self.watch.phase(f"ending step {number}")
        if not self.source.plans_ahead:  # such a source samples from the new weights or publishes them
            self._check_weights()
        with self.times.measure("sync"):
            self.observers.updated(number, self.state.documents_seen)
        self.directory.record_step(number, plan, self.put_aside, digests)
        num_rejected, self._num_rejected = self._num_rejected, 0
        num_put_aside, self.put_aside = len(self.put_aside), []
        self.observers.trained(number, plan, accumulated.scores)
        metrics = accumulated.line()
        elapsed = time.perf_counter() - start
        spent = self.times.line(elapsed, measured, self.runner.stopwatch.drain())
        line = {
            "step": number,
            **metrics,
            "documents_seen": self.state.documents_seen,
            "num_rejected": num_rejected,
            "num_put_aside": num_put_aside,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens_per_second": plan.totals.num_tokens / elapsed,
            "step_time": elapsed,
            **spent,
            **gpu_metrics(self.policy, plan, spent),
            **self.marks,
        }
        self.marks.pop("lost_seconds", None)  # only the first step's line has it
        self.observers.step(line)

    def _digests(self, plan: StepPlan) -> list[str] | None:
        """Compute the digests of the step's documents for the ledger, if this run keeps them. Every rank calls this."""
        if self.learner.trace is None:
            return None
        return digests_by_all(plan.documents, self.annotators.fill(REFERENCE), self.ranks)

    def _accumulate(self, plan: StepPlan, measured: Mapping[str, float]) -> Accumulated:
        """Compute the step's metrics and gradient, and keep the scores that annotators and observers need."""
        wanted = self.observers.wanted(plan)
        runner = self.runner
        if self.check is not None and not self.check.due(self.step + 1):
            runner = replace(runner, compares=None)
        if self.annotators.needs_scores or (wanted and runner.keep_scores is not True):
            runner = replace(runner, keep_scores=self.annotators.needs_scores or wanted)
        extra = {name: Max(number) for name, number in measured.items()}
        accumulated = runner.accumulate(plan, extra_metrics=extra)
        self.annotators.computed(plan, accumulated.scores)
        return accumulated

    def _fault(self, plan: StepPlan, accumulated: Accumulated) -> str | None:
        """Describe a fault in the sampler's log-probs or draws; None if there is none."""
        if self.check is None:
            return None
        with self.times.measure("check"):
            return self.check.before_update(plan, accumulated)

    def _unusable(self, number: int, fault: str) -> TrainingError:
        self._finish_save()
        return TrainingError(
            f"step {number}: {fault}. Nothing was updated, and the last checkpoint is "
            f"{self.checkpoints.latest() or 'not written yet'}"
        )

    def _useless(self, number: int, plan: StepPlan, accumulated: Accumulated, norm: float) -> TrainingError:
        """Make the error of a gradient that no update may use, and name its cause."""
        self.watch.phase(f"looking for what makes the gradient of step {number} {norm}")
        cause = find_cause(self.runner, plan, self.learner.gradient_clip)
        why = explain_useless(norm, self.learner.gradient_clip)
        self.learner.forget_gradient()
        return self._unusable(number, f"{why} (loss {accumulated.line()['loss']}); {cause}")

    def _check_weights(self) -> None:
        """Raise if the last update left weights that are not finite. Called before weights are saved, published,
        evaluated or trained, on every rank."""
        if not (ruined := self.learner.update_check.ruined()):
            return
        self._finish_save()
        self.learner.forget_gradient()
        raise TrainingError(
            f"step {self.step}: its update left weights that are not finite, or close to it: {some(ruined)}. Its "
            f"gradient was finite, and the learning rate {self.learner.update_check.learning_rate:g}: lower "
            "optimizer.learning_rate. Nothing was saved, published or evaluated since, and the last checkpoint is "
            f"{self.checkpoints.latest() or 'not written yet'}"
        )

    def _evaluation_due(self) -> bool:
        every = self.evaluate_every
        return every > 0 and self.step % every == 0 and self.state.last_evaluated != self.step

    def _lacks_evaluation(self) -> bool:
        return self.evaluator is not None and self.state.last_evaluated != self.step

    def _is_best(self) -> bool:
        """Return whether the run was evaluated after this step, with the best result so far."""
        evaluated = self.evaluator is not None and self.state.last_evaluated == self.step
        return evaluated and self.ranks.share(lambda: self.checkpoints.wants(self.step))

    def _evaluate(self) -> None:
        if self.evaluator is None:
            return
        self._check_weights()
        self.watch.phase(f"evaluating after step {self.step}")
        try:
            with self.times.measure("evaluation"):
                line = self.evaluator.run(self.step, self.state.documents_seen, self.source.asked_to_stop)
        except Interrupted:  # the resumed run makes this evaluation first
            return
        self.state.last_evaluated = self.step
        self.directory.record_evaluation(line)
        self.checkpoints.evaluated(line)
        self.observers.evaluated(line)

    def _save(self) -> None:
        """Begin a save, after the save that is under way has finished."""
        self._check_weights()
        if self.save_rule.never:
            return
        self._finish_save()
        self.watch.phase(f"saving after step {self.step}")
        with self.times.measure("save"):
            self._saved(self._begin_save(self.saves))
        # Callbacks must be called after the same step in every run, however fast the disk is.
        if self.ranks.share(lambda: self.callbacks.hear_of_checkpoints or self.source.waits_for_checkpoints):
            self._finish_save()

    def _prepare(self, saves: Saves) -> None:
        saves.prepare(self.policy, lambda: optimizer_parts(self.optimizer, self.policy.weights))

    def _keep_in_memory(self, memory: Saves) -> None:
        """Begin to copy the state to host memory if a copy is due. The copy is complete before the next update."""
        if self.step % self.save_rule.in_memory_every:
            self._prepare(memory)
        elif self.steps is None or self.step < self.steps:
            self._check_weights()
            with self.times.measure("save"):
                self._begin_save(memory)

    def _before_update(self) -> None:
        self.saves.before_update()
        if self.memory is not None and self.memory.under_way:
            self.watch.phase(f"keeping step {self.step} in memory")
            with self.times.measure("save"):
                self.memory.finish()
            self.watch.phase(f"computing step {self.step + 1}")

    def _begin_save(self, saves: Saves) -> Complete | None:
        written = self.observers.saving()

        def sync() -> None:
            for put_on_disk in written:
                put_on_disk()
            self.directory.sync()

        planned = self.state.planned or self.plans.snapshot()
        progress = Progress(
            step=self.step,
            queue=planned.state(),
            carried=self.annotators.carried(planned.carried),
            rejected_bytes=self.directory.rejected_bytes(),
            ledger_bytes=self.directory.ledger_bytes(),
            callbacks=self.callbacks.state(),
            entropy_bonus=self.runner.objective.steered_weight,
        )
        optimizer_state = optimizer_parts(self.optimizer, self.policy.weights)
        hugging_face = self.save_rule.is_hugging_face(self.step)
        return saves.begin(self.policy, optimizer_state, progress, self.state.documents_seen, hugging_face, sync)

    def _save_last(self, deadline: float | None) -> None:
        """Save at the end of the run, before the deadline if there is one."""
        self._finish_save(deadline)
        if deadline is not None and any(self.ranks.gather(time.monotonic() > deadline)):
            return
        self._save()
        self._finish_save(deadline)

    def _finish_save(self, deadline: float | None = None) -> None:
        """Wait for the save that is under way, at most until the deadline."""
        if not self.saves.under_way:
            return
        self.watch.phase(f"saving after step {self.step}")
        with self.times.measure("save"):
            self._saved(self.saves.finish(deadline))

    def _saved(self, complete: Complete | None) -> None:
        if complete is None:
            return
        self.state.saved = complete.step
        self.source.checkpointed(complete.documents_seen)
        self.observers.saved(complete.path, complete.step, complete.documents_seen)

    @contextmanager
    def _stop_between_steps(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP: the first ends the run after the current step, a second at once."""

        def ask(number: int, frame: object) -> None:
            self.ask_to_stop(number)
            for kind, handler in before.items():
                signal.signal(kind, handler)

        kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {kind: signal.getsignal(kind) for kind in kinds}
        try:
            for kind in kinds:
                signal.signal(kind, ask)
        except ValueError:  # only the main thread may set signal handlers
            before = {}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
