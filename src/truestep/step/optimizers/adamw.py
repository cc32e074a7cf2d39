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
    together: None = None

    def begin(self, name: str, part: torch.Tensor) -> State:
        return {"exp_avg": torch.zeros_like(part), "exp_avg_sq": torch.zeros_like(part)}

    def update(self, slots: Sequence[Slot], rate: float) -> None:
        options = self.options
        device = slots[0].weight.device
        numbers = {number: torch.full((), float(number), device=device) for number in {slot.number for slot in slots}}
        torch._fused_adamw_(
            [slot.weight for slot in slots],
            [slot.gradient for slot in slots],
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [numbers[slot.number] for slot in slots],
            lr=rate,
            beta1=options.betas[0],
            beta2=options.betas[1],
            weight_decay=options.weight_decay,
            eps=options.epsilon,
            amsgrad=False,
            maximize=False,
        )
