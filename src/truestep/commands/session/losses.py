"""The losses that a session's calls are given, and the parts that these need."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from truestep.commands.session.errors import SessionError
from truestep.config.schema import NOTHING_IS_DRAWN, Config
from truestep.losses.label_losses import LabelLoss, LabelTerm
from truestep.losses.labels import Labels
from truestep.losses.objective import Denominator, Objective
from truestep.ranks.group import Ranks
from truestep.run.assemble.policy import make_policy
from truestep.run.assemble.step import make_annotators, make_objective
from truestep.step.before.annotators import Annotators
from truestep.step.compute.runner import StepRunner
from truestep.types import Rollout

# A user's loss, from the log-probs of each document's labels and the documents to one number for autograd.
Closure = Callable[[list[torch.Tensor], Sequence[Rollout]], torch.Tensor]
Loss = Mapping[str, Any] | LabelLoss | Closure | None


@dataclass(frozen=True)
class _GivenSlopes(LabelLoss):
    """A loss with known slopes, which are stored as the labels' advantages."""

    def __call__(self, labels: Labels) -> LabelTerm:
        return LabelTerm(labels.advantages * labels.logprobs, labels.advantages)


# With documents of `with_slopes`, the gradient has their slopes and no denominator.
GIVEN_SLOPES = Objective(_GivenSlopes(), Denominator("constant", max_labels=1))


def with_slopes(document: Rollout, slopes: np.ndarray) -> Rollout:
    """Return the document with the slopes of its labels in place of its advantages."""
    at_tokens = np.zeros(document.num_tokens, np.float32)
    at_tokens[document.loss_mask] = slopes
    return replace(document, advantages=at_tokens, difference=None)


@dataclass(frozen=True)
class Parts:
    """The parts that a loss needs. `config` says which fields records must have."""

    config: Config
    objective: Objective
    annotators: Annotators


class PartsOfLosses:
    """The parts of each loss that was used. They are made once for each section: one may be a reference model."""

    def __init__(self, config: Config, ranks: Ranks):
        self._config, self._ranks = config, ranks
        self._parts: dict[str, Parts] = {}  # by the section as JSON; of the configuration's own loss by ""

    def clear(self) -> None:
        self._parts.clear()

    def of(self, loss: Mapping[str, Any] | LabelLoss | None, runner: StepRunner) -> Parts:
        """Return the parts that a loss needs. `runner` has the objective of the session's own loss."""
        if loss is not None and not isinstance(loss, (Mapping, LabelLoss)):
            raise SessionError(f"loss is {loss!r}: give a section of a configuration, a LabelLoss or a function")
        if isinstance(loss, Mapping):
            name = json.dumps(loss, default=repr, sort_keys=True)
            if name not in self._parts:
                config = self._config.changed({"loss": dict(loss), **NOTHING_IS_DRAWN})
                self._parts[name] = self._make(config, replace(runner, objective=make_objective(config)))
            return self._parts[name]
        if "" not in self._parts:
            self._parts[""] = self._make(self._config, runner)
        objective = runner.objective  # an entropy target changes it each step
        if loss is not None:
            objective = replace(objective, label_loss=loss)
        return replace(self._parts[""], objective=objective)

    def _make(self, config: Config, runner: StepRunner) -> Parts:
        annotators = make_annotators(
            config, runner, lambda of: make_policy(config, self._ranks, of or config.model.path, frozen=True)
        )
        return Parts(config, runner.objective, annotators)


def needs_whole_step(objective: Objective, documents: Sequence[Rollout], *, has_router_terms: bool) -> str:
    """Return the option that needs all documents of a step in one call; empty if there is none."""
    if has_router_terms:
        return "model.experts: a term of routers"
    if objective.clip_cov is not None or objective.kl_cov is not None:
        return "the choice of labels of loss.clip_cov and loss.kl_cov"
    return "data.advantages over the step" if any(one.difference is not None for one in documents) else ""
