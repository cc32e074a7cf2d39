"""Adam with decoupled weight decay, which needs no memory beside the two moments.

On a GPU one kernel reads and writes each number once: it clips the gradient, and rounds the weight for the model.
Elsewhere torch's fused kernel serves, with a pass before it and one behind it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from truestep.self_test import serves
from truestep.step.optimizers.by_weight import Slot, State, Update, round_weights, scale_gradients


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

    def prepare(self, slots: Sequence[Slot]) -> Update:
        filled = [slot for slot in slots if slot.weight.numel()]
        ready = [kernel_serves(slot.weight.device) and in_one_piece(slot) for slot in filled]
        updates = []
        for prepared, wanted in ((in_one_pass, True), (in_passes, False)):
            some = [slot for slot, is_ready in zip(filled, ready, strict=True) if is_ready == wanted]
            if some:
                updates.append(prepared(some, self.options))

        def update(rate: float, scale: float) -> None:
            for each in updates:
                each(rate, scale)

        return update


def in_passes(slots: Sequence[Slot], options: AdamWOptions) -> Update:
    """Prepare an update by torch's fused kernel."""
    device = slots[0].weight.device
    numbers = {number: torch.full((), float(number), device=device) for number in {slot.number for slot in slots}}

    def update(rate: float, scale: float) -> None:
        scale_gradients(slots, scale)
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
        round_weights(slots)

    return update


def in_one_piece(slot: Slot) -> bool:
    """Tell whether the kernel can go through all numbers of a slot in their order in memory."""
    tensors = (slot.weight, slot.gradient, slot.state["exp_avg"], slot.state["exp_avg_sq"])
    plain = all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    return plain and (slot.rounded is None or slot.rounded.is_contiguous())


def in_one_pass(slots: Sequence[Slot], options: AdamWOptions) -> Update:
    """Prepare an update by a kernel that reads and writes each number once."""
    from truestep.step.optimizers.adamw_kernel import Numbers, Table

    tables = [Table(some) for some in _alike(slots)]

    def update(rate: float, scale: float) -> None:
        for table in tables:
            table.update(Numbers(*options.betas, options.epsilon, options.weight_decay, rate, scale))

    return update


def _alike(slots: Sequence[Slot]) -> Iterable[list[Slot]]:
    """Sort slots by the type that they are rounded to."""
    by_type: dict[torch.dtype | None, list[Slot]] = {}
    for slot in slots:
        by_type.setdefault(None if slot.rounded is None else slot.rounded.dtype, []).append(slot)
    return by_type.values()


@cache
def kernel_serves(device: torch.device) -> bool:
    """Tell whether the kernel runs on a device and does there what torch's does."""
    if device.type != "cuda":
        return False
    return serves("the kernel of optimizer.type: adamw", "torch's does, and takes longer", lambda: wrong_on(device))


def wrong_on(device: torch.device, rounded: torch.dtype = torch.bfloat16) -> str | None:
    """Name what the kernel gets wrong on a device: weights of several sizes, one of which begins between two lines."""
    generator = torch.Generator().manual_seed(0)
    options = AdamWOptions((0.9, 0.99), 1e-8, 0.1)
    found = []
    start = [torch.randn(count, generator=generator).to(device) for count in (1, 4096, 10_001, 70_000)]
    for update in (in_passes, in_one_pass):
        slots = []
        for number, weight in enumerate([*(each.clone() for each in start), start[-1].clone()[1:]]):
            state = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            lower = torch.empty_like(weight, dtype=rounded) if number != 1 else None
            slots.append(Slot(str(number), 0, 1 + number, weight, weight.sin() * 10.0 ** (number - 4), state, lower))
        for _ in range(2):
            update([replace(slot, gradient=slot.gradient.clone()) for slot in slots], options)(1e-2, 0.3)
        found.append(slots)
    for plain, fused in zip(*found, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            if not torch.allclose(plain.state[name], fused.state[name], rtol=1e-5, atol=0):
                return f"{name} of {plain.weight.numel()} numbers"
        if not torch.allclose(plain.weight, fused.weight, rtol=1e-5, atol=1e-7):
            return f"the weights of {plain.weight.numel()} numbers"
        if fused.rounded is not None and not torch.equal(fused.rounded, fused.weight.to(rounded)):
            return f"the rounded weights of {plain.weight.numel()} numbers"
    return None
