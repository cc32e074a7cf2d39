"""AdamW over the float32 weights, with decay on matrices only, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from truestep.policy.weights.protocol import Weights


@dataclass(frozen=True)
class LearningRate:
    """A function of the step alone, so that a resumed run needs no state for it."""

    peak: float
    schedule: str
    warmup_steps: int
    minimum: float
    steps: int | None

    def at(self, step: int) -> float:
        """Of the update number `step`, from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant" or self.steps is None:
            return self.peak
        # 0 at the first step after warm-up, which has the peak; 1 just behind the last step: no update is for nothing.
        progress = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        remaining = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.minimum + (self.peak - self.minimum) * remaining


def make_adamw(
    weights: Weights, *, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> torch.optim.AdamW:
    """Norms and biases are vectors and are never decayed."""
    matrices = [parameter for parameter in weights.master.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in weights.master.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=betas, eps=epsilon)


def update(optimizer: torch.optim.Optimizer, weights: Weights, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    weights.publish()


_MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, torch.Tensor]:
    """The optimizer's state by weight name, whole, for a checkpoint: on the first rank. Every rank calls this."""
    states = {name: optimizer.state.get(master, {}) for name, master in weights.master.items()}
    updates = max(weights.ranks.gather(max((float(state.get("step", 0)) for state in states.values()), default=0.0)))
    if not updates:
        return {}
    kept: dict[str, torch.Tensor] = {}
    trained = [name for name, piece in weights.pieces.items() if piece.trained]
    for kind in _MOMENTS:
        found = weights.on_first({name: states.get(name, {}).get(kind) for name in trained})
        kept |= {f"{name}.{kind}": whole for name, whole in found.items()}
    if weights.ranks.first:  # every weight has been updated as often
        kept |= {f"{name}.step": torch.tensor(updates) for name in trained}
    return kept


def restore_optimizer(optimizer: torch.optim.Optimizer, weights: Weights, tensors: dict[str, torch.Tensor]) -> None:
    for name, master in weights.master.items():
        state = {kind: tensors[f"{name}.{kind}"] for kind in _MOMENTS if f"{name}.{kind}" in tensors}
        moments = {kind: weights.part_of(name, value).to(master.device, copy=True) for kind, value in state.items()}
        # A number on the host, where AdamW keeps it.
        optimizer.state[master] = moments | ({"step": tensors[f"{name}.step"].clone()} if moments else {})
