"""A policy with its objective and its optimizer. It computes gradients of plans and updates the weights.

`train` and `Session` are loops over it. All ranks call its methods together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from truestep.metrics.loads import Counts
from truestep.model.policy import Policy
from truestep.process.progress import working
from truestep.step.compute.runner import StepRunner
from truestep.step.update.gradient_clipping import clip_scale, gradient_norm, usable
from truestep.step.update.optimizer import forget_prepared, prepare, update
from truestep.weights.digests import Squares, Trace
from truestep.weights.finite import UpdateCheck


@dataclass
class Learner:
    runner: StepRunner
    optimizer: torch.optim.Optimizer
    gradient_clip: float | None
    trace: Trace | None = None  # digests and norms of the weights after each update
    update_check: UpdateCheck = field(init=False)
    _squares: Squares = field(default_factory=Squares)  # squared gradient norms by weight, for `trace`

    def __post_init__(self) -> None:
        self.update_check = UpdateCheck(self.policy.weights)

    @property
    def policy(self) -> Policy:
        return self.runner.policy

    def gradient_norm(self) -> float:
        """Compute the norm of the whole gradient, before clipping."""
        meanwhile = partial(prepare, self.optimizer)
        return gradient_norm(self.policy.weights, meanwhile, None if self.trace is None else self._squares)

    def usable(self, norm: float) -> bool:
        """Tell whether an update may use a gradient of this norm."""
        return usable(norm, self.gradient_clip)

    def forget_gradient(self) -> None:
        """Discard what `gradient_norm` prepared in the optimizer, if no update follows."""
        forget_prepared(self.optimizer)

    def update(
        self,
        rate: float,
        norm: float,
        loads: Counts | None,
        scale: float = 1.0,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Update the weights by the gradient times `scale`, clipped. `norm` is the norm of the scaled gradient.
        `loads`: the counts of chosen experts in the step. `before` is called just before the weights change."""
        with self.runner.stopwatch.measure("optimizer"), working("updating weights", "numbers updated"):
            clip = clip_scale(norm, self.gradient_clip)
            before()
            update(self.optimizer, self.policy.weights, rate, clip * scale)
            if self.policy.routing is not None and loads is not None:
                self.policy.routing.move_biases(loads)
            self.update_check.ask(rate)
            if self.trace is not None:
                self.trace.ask(self._squares)
