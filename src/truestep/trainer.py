"""The training loop: wires the rooms together and does nothing of its own."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from truestep.checkpoint.store import CheckpointStore, Progress
from truestep.errors import TruestepError
from truestep.metrics.sinks import Sink
from truestep.policy.policy import Policy
from truestep.rollouts.source import Source
from truestep.run_directory import RunDirectory
from truestep.sampler.evaluate import Evaluator
from truestep.step.optimizer import LearningRate, optimizer_tensors, update
from truestep.step.queue import PlanQueue
from truestep.step.run import StepRunner, clip_gradients, gradient_norm
from truestep.types import StepPlan


class TrainingError(TruestepError):
    """The run cannot go on, and why."""


@dataclass
class Trainer:
    policy: Policy
    source: Source
    queue: PlanQueue
    runner: StepRunner
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    gradient_clip: float | None
    directory: RunDirectory
    checkpoints: CheckpointStore
    checkpoint_every: int
    sinks: Sequence[Sink]
    steps: int | None = None
    evaluator: Evaluator | None = None
    evaluate_every: int = 0
    step: int = 0  # done so far
    stopped_by: int | None = None  # the signal that asked
    last_evaluated: int | None = None  # after which step

    def run(self) -> str:
        """Until the steps or the data end, or a signal asks to stop; the last word on how it ended."""
        finished = False
        try:
            ended, finished = self._run()
            return ended
        finally:
            self.source.close(finished)
            self.directory.unlock()

    def _run(self) -> tuple[str, bool]:
        with self._stop_between_steps():
            if self.last_evaluated is None:
                self._evaluate()
            ended = self._steps()
        if ended is not None and self.last_evaluated != self.step:
            self._evaluate()
        self._save()
        if ended is not None:
            self.stopped_by = None  # it came too late to stop anything
        stopped = f"stopped by a signal after step {self.step}; the same command goes on from here"
        return ended or stopped, ended is not None

    def _steps(self) -> str | None:
        """How the run ended; None where a signal asked to stop before that."""
        while self.steps is None or self.step < self.steps:
            if self.stopped_by is not None:
                return None
            start = time.perf_counter()
            try:
                plan = self.queue.next_plan()
            finally:  # also where every document was rejected, and the error says to look there
                rejected = self.source.drain_rejected()
                self.directory.record_rejected(rejected)
            waited = time.perf_counter() - start
            if plan is None:
                return self._end_of_data()
            self._train(plan, start, waited, len(rejected))
            if self.evaluate_every and self.step % self.evaluate_every == 0:
                self._evaluate()
            if self.checkpoint_every and self.step % self.checkpoint_every == 0:
                self._save()
        return f"all {self.steps} steps are done"

    def _end_of_data(self) -> str:
        dropped = len(self.queue.dropped)
        note = f"; the last {dropped} documents make no whole step and were dropped" if dropped else ""
        of = f" of {self.steps}" if self.steps else ""
        return f"the data ended after step {self.step}{of}{note}"

    def _train(self, plan: StepPlan, start: float, waited: float, num_rejected: int) -> None:
        number = self.step + 1
        accumulated = self.runner.accumulate(plan)
        gradients = self.policy.weights.gradients
        norm = gradient_norm(gradients)
        if not math.isfinite(norm):
            loss = accumulated.line()["loss"]
            raise TrainingError(
                f"step {number}: the gradient's norm is {norm} (loss {loss}); nothing was updated, and the last "
                f"checkpoint is {self.checkpoints.latest() or 'not written yet'}"
            )
        clip_gradients(gradients, norm, self.gradient_clip)
        rate = self.learning_rate.at(number)
        update(self.optimizer, self.policy.weights, rate)
        self.step = number
        self.source.updated(self.queue.documents_seen)
        self.directory.record_step(number, plan)
        line: dict[str, Any] = {"step": number, **accumulated.line()}
        elapsed = time.perf_counter() - start
        line |= {
            "documents_seen": self.queue.documents_seen,
            "num_rejected": num_rejected,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens_per_second": plan.totals.num_tokens / elapsed,
            "data_wait_time": waited,
            "step_time": elapsed,
        }
        for sink in self.sinks:
            sink.step(line)

    def _evaluate(self) -> None:
        if self.evaluator is None:
            return
        self.last_evaluated = self.step
        line = self.evaluator.run(self.step, self.queue.documents_seen)
        self.directory.record_evaluation(line)
        for sink in self.sinks:
            sink.evaluation(line)

    def _save(self) -> None:
        self.directory.sync()
        progress = Progress(
            step=self.step,
            queue=self.queue.state(),
            carried=self.queue.carried,
            rejected_lines=self.directory.rejected_lines(),
            optimizer=optimizer_tensors(self.optimizer, self.policy.weights),
        )
        checkpoint = self.checkpoints.save(self.policy, progress)
        self.source.checkpointed(checkpoint, self.step, self.queue.documents_seen)

    @contextmanager
    def _stop_between_steps(self) -> Iterator[None]:
        """The first interrupt or termination ends the run after the step in hand; a second ends it at once."""

        def ask(number: int, frame: object) -> None:
            self.stopped_by = number
            for kind, handler in before.items():
                signal.signal(kind, handler)

        kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {kind: signal.getsignal(kind) for kind in kinds}
        try:
            for kind in kinds:
                signal.signal(kind, ask)
        except ValueError:  # not the main thread: whoever runs us there handles its own signals
            before = {}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
