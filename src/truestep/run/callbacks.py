"""Callbacks: a user's own code that is told how a run goes, and may stop it or change its learning rate.

They are called on the first rank. What they ask for is agreed on by all ranks before the next step, so that every rank
does the same.
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
    """What a callback did wrong. The exception that it raised is the cause."""


@dataclass
class Run:
    """A run as a callback sees it."""

    directory: Path
    """The run's directory: metrics.jsonl, ledger.jsonl, checkpoints and the rest."""
    step: int = 0
    """The number of the last step that was made."""
    documents_seen: int = 0
    """The documents that the policy has been trained on."""
    learning_rate_factor: float = 1.0
    """What the learning rate of the configuration is multiplied by from the next step on."""
    stop_reason: str | None = None
    """Why a callback asked to stop."""

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run before the next step, with a checkpoint. Started again, the run goes on from there."""
        self.stop_reason = reason

    def multiply_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate by this, from the next step on and for good. Several factors multiply.

        The schedule of the configuration (warm-up, cosine) goes on beneath. The factor is part of a checkpoint: a run
        that goes on has it again.
        """
        if not 0 <= factor < float("inf"):
            raise CallbackError(f"the learning rate cannot be multiplied by {factor}")
        self.learning_rate_factor *= factor


class Callback:
    """A base for callbacks; a method that is not overridden does nothing.

    A method that raises ends the run with a CallbackError; the last checkpoint stays.
    """

    def on_start(self, run: Run) -> None:
        """Called before the first step of this start, once what a checkpoint holds is back in place."""

    def on_rollouts(self, run: Run, rollouts: Sequence[Rollout]) -> None:
        """Called with the documents of a step, in their order, before the step is computed."""

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Called after an update, with the step's line of metrics.jsonl."""

    def on_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        """Called after an evaluation, with its line of evaluation.jsonl."""

    def on_checkpoint(self, run: Run, checkpoint: Path) -> None:
        """Called when a checkpoint is complete; the run waits for it. `export` makes a Hugging Face directory of it, or
        `checkpoint.hugging_face_every` makes it one."""

    def on_end(self, run: Run, ended: str) -> None:
        """Called at the end of a run, also of one that was stopped, with the sentence that says how it ended."""

    def state(self) -> Any:
        """Give what this callback has to remember, as JSON: a checkpoint holds it. None: nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what `state` gave, where a run goes on from a checkpoint."""


def _read_only(rollout: Rollout) -> Rollout:
    """Give a rollout that can be looked at and not written to: only the first rank has callbacks, and all have to train
    on the same numbers."""
    shown: dict[str, Any] = {"rewards": dict(rollout.rewards), "metadata": deepcopy(dict(rollout.metadata))}
    for field in fields(rollout):
        if isinstance(array := getattr(rollout, field.name), np.ndarray):
            shown[field.name] = array.view()
            shown[field.name].flags.writeable = False
    return replace(rollout, **shown)


@dataclass(eq=False)
class Callbacks(Observer):
    """The callbacks of a run as one observer, what they asked for, and what of it a checkpoint holds."""

    run: Run
    callbacks: Sequence[Callback] = ()
    applied_factor: float = 1.0  # of the step in hand: the same on all ranks
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
        """True where one of them does something when a checkpoint is complete."""
        return any(type(callback).on_checkpoint is not Callback.on_checkpoint for callback in self.callbacks)

    def saved(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        if checkpoint == self._last_checkpoint:  # the run ends after the step that it was saved at
            return
        self._last_checkpoint = checkpoint
        self._each("on_checkpoint", lambda callback: callback.on_checkpoint(self.run, checkpoint))

    def ended(self, ended: str, finished: bool) -> None:
        self._each("on_end", lambda callback: callback.on_end(self.run, ended))

    def agree(self, of_first_rank: tuple[float, str | None]) -> None:
        """Take over what the first rank's callbacks asked for; from here on it counts."""
        self.applied_factor, self.run.stop_reason = of_first_rank
        self.run.learning_rate_factor = self.applied_factor

    @property
    def asked(self) -> tuple[float, str | None]:
        """What the callbacks ask for: the factor of the learning rate, and the reason to stop."""
        return self.run.learning_rate_factor, self.run.stop_reason

    def state(self) -> dict[str, Any]:
        """Describe, as JSON, what a run that goes on needs; {} where nothing was ever asked for."""
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
        """Put back what a checkpoint holds; a callback gets the state of the first one of its class that is left."""
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
