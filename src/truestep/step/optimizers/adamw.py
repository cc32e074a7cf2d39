"""Adam with decoupled weight decay, by torch's fused kernel, which needs no memory beside the two moments."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from truestep.step.optimizers.by_weight import Slot, State


@dataclass(frozen=True)
class AdamWOptions:
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float


@dataclass(frozen=True)
class AdamW:
    options: AdamWOptions
    together: int = 0

    def begin(self, name: str, part: torch.Tensor) -> State:
        return {"exp_avg": torch.zeros_like(part), "exp_avg_sq": torch.zeros_like(part)}

    def update(self, slots: Sequence[Slot], rate: float) -> None:
        options = self.options
        for slot in slots:
            torch._fused_adamw_(
                [slot.weight],
                [slot.gradient],
                [slot.state["exp_avg"]],
                [slot.state["exp_avg_sq"]],
                [],
                [torch.full((), float(slot.number), device=slot.weight.device)],
                lr=rate,
                beta1=options.betas[0],
                beta2=options.betas[1],
                weight_decay=options.weight_decay,
                eps=options.epsilon,
                amsgrad=False,
                maximize=False,
            )
