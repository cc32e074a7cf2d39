"""Callbacks: the user's own code, called on events of a run. A callback may stop the run or change its learning rate.

Callbacks are called on the first rank only. Before the next step, all ranks receive their requests.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from truestep.errors import TruestepError
from truestep.metrics.observers import Observer
from truestep.types import Rollout


class CallbackError(TruestepError):
    """The error of a callback; its `__cause__` is the exception that the callback raised."""


@dataclass
class Run:
    """The state of a run that callbacks read, and its methods for their requests."""

    directory: Path
    """The run's directory: metrics.jsonl, ledger.jsonl, checkpoints and the rest."""
    step: int = 0
    """The number of the last completed step."""
    documents_seen: int = 0
    """The documents that the policy has been trained on."""
    learning_rate_factor: float = 1.0
    """The factor on the learning rate of the configuration, from the next step on."""
    stop_reason: str | None = None
    """The reason that a callback gave to stop; None if none did."""

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run before the next step, with a checkpoint, from which the same command resumes."""
        self.stop_reason = reason

    def multiply_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate by `factor` from the next step on. Factors of several calls multiply.

        The factor applies on top of the schedule (warm-up, cosine). Checkpoints hold it, so a resumed run keeps it.
        """
        if not 0 <= factor < float("inf"):
            raise CallbackError(f"the learning rate cannot be multiplied by {factor}")
        self.learning_rate_factor *= factor


class Callback:
    """A base class of callbacks whose methods do nothing.

    A method that raises ends the run with a CallbackError; the last checkpoint stays.
    """

    def on_start(self, run: Run) -> None:
        """Called before the first step of this start, after the checkpoint is restored."""

    def on_rollouts(self, run: Run, rollouts: Sequence[Rollout]) -> None:
        """Called with the documents of a step, in their order, before the step is computed."""

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Called after an update, with the step's line of metrics.jsonl."""

    def on_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        """Called after an evaluation, with its line of evaluation.jsonl."""

    def on_checkpoint(self, run: Run, checkpoint: Path) -> None:
        """Called when a checkpoint is complete. A run with this callback waits until each checkpoint is on the disk.
        To load a checkpoint with Hugging Face, use `truestep export` or `checkpoint.hugging_face_every`."""

    def on_end(self, run: Run, ended: str) -> None:
        """Called at the end of a run, stopped or finished, with a sentence that says how it ended."""

    def state(self) -> Any:
        """Return the state of this callback as JSON, to be saved in a checkpoint; None if there is no state."""
        return None

    def restore(self, state: Any) -> None:
        """Restore the value that `state` returned, when a run resumes from a checkpoint."""


def _read_only(rollout: Rollout) -> Rollout:
    """Return a read-only view of a rollout. Only the first rank has callbacks, so a change would make ranks differ."""
    shown: dict[str, Any] = {"rewards": dict(rollout.rewards), "metadata": deepcopy(dict(rollout.metadata))}
    for field in fields(rollout):
        if isinstance(array := getattr(rollout, field.name), np.ndarray):
            shown[field.name] = array.view()
            shown[field.name].flags.writeable = False
    return replace(rollout, **shown)


@dataclass(eq=False)
class Callbacks(Observer):
    """The callbacks of a run as one observer, with their requests and their state in a checkpoint."""

    run: Run
    callbacks: Sequence[Callback] = ()
    applied_factor: float = 1.0  # the learning rate factor of the current step, the same on all ranks
    _last_checkpoint: Path | None = None

    def started(self) -> None:
        self._each("on_start", lambda callback: callback.on_start(self.run))

    def rollouts(self, documents: Sequence[Rollout]) -> None:
        if any(type(callback).on_rollouts is not Callback.on_rollouts for callback in self.callbacks):
            self._each("on_rollouts", lambda callback: callback.on_rollouts(self.run, [*map(_read_only, documents)]))

    def step(self, line: Mapping[str, Any]) -> None:
        self.run.step, self.run.documents_seen = line["step"], line["documents_seen"]
        self._each("on_step", lambda callback: callback.on_step(self.run, dict(line)))

    def evaluated(self, line: Mapping[str, Any]) -> None:
        self._each("on_evaluation", lambda callback: callback.on_evaluation(self.run, deepcopy(dict(line))))

    @property
    def hear_of_checkpoints(self) -> bool:
        """True if a callback overrides `on_checkpoint`."""
        return any(type(callback).on_checkpoint is not Callback.on_checkpoint for callback in self.callbacks)

    def saved(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        if checkpoint == self._last_checkpoint:  # the last step was saved, and the end of the run saves again
            return
        self._last_checkpoint = checkpoint
        self._each("on_checkpoint", lambda callback: callback.on_checkpoint(self.run, checkpoint))

    def ended(self, ended: str, finished: bool) -> None:
        self._each("on_end", lambda callback: callback.on_end(self.run, ended))

    def agree(self, of_first_rank: tuple[float, str | None]) -> None:
        """Apply the requests of the first rank's callbacks on this rank."""
        self.applied_factor, self.run.stop_reason = of_first_rank
        self.run.learning_rate_factor = self.applied_factor

    @property
    def asked(self) -> tuple[float, str | None]:
        """The requests of the callbacks: the learning rate factor and the reason to stop."""
        return self.run.learning_rate_factor, self.run.stop_reason

    def state(self) -> dict[str, Any]:
        """Return the callbacks' states and the learning rate factor as JSON; {} if all have their defaults."""
        states = [[type(callback).__qualname__, self._state_of(callback)] for callback in self.callbacks]
        kept = {"callbacks": states} if any(state is not None for _, state in states) else {}
        factor = self.run.learning_rate_factor
        return kept | ({"learning_rate_factor": factor} if factor != 1.0 else {})

    def _state_of(self, callback: Callback) -> Any:
        try:
            return json.loads(json.dumps(callback.state(), allow_nan=False))
        except Exception as error:
            raise self._failure(callback, "state", error) from error

    def restore(self, state: Mapping[str, Any], step: int, documents_seen: int) -> None:
        """Restore the state of a checkpoint. Each callback takes the first saved state of its class not yet taken."""
        self.run.step, self.run.documents_seen = step, documents_seen
        self.run.learning_rate_factor = self.applied_factor = float(state.get("learning_rate_factor", 1.0))
        states = list(state.get("callbacks", ()))
        for callback in self.callbacks:
            found = next((entry for entry in states if entry[0] == type(callback).__qualname__), None)
            if found is not None:
                states.remove(found)
            if found is not None and found[1] is not None:
                self._restore(callback, found[1])

    def _restore(self, callback: Callback, state: Any) -> None:
        self._call(callback, "restore", lambda callback: callback.restore(state))

    def _each(self, name: str, call: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            self._call(callback, name, call)

    def _call(self, callback: Callback, name: str, call: Callable[[Callback], None]) -> None:
        try:
            call(callback)
        except Exception as error:
            raise self._failure(callback, name, error) from error

    def _failure(self, callback: Callback, name: str, error: Exception) -> CallbackError:
        problem = str(error) if isinstance(error, CallbackError) else f"raised {type(error).__name__}: {error}"
        return CallbackError(f"{type(callback).__qualname__}.{name}, after step {self.run.step}: {problem}")
