"""AdamW: Adam with decoupled weight decay. It needs no temporary memory.

On a GPU, one Triton kernel clips the gradient, updates the weight and rounds it for the model: each number is read and
written once. Otherwise, torch's fused kernel does the update, after one pass that clips and before one pass that
rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from truestep.gpu.self_test import serves
from truestep.step.update.optimizers.by_weight import Slot, State, Update, round_weights, scale_gradients


@dataclass(frozen=True)
class AdamWOptions:
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float


@dataclass(frozen=True)
class AdamW:
    """The update rule of AdamW."""

    options: AdamWOptions
    kernel: bool = False  # use the Triton kernel; the same on every rank
    together: None = None

    def without_decay(self) -> "AdamW":
        return replace(self, options=replace(self.options, weight_decay=0.0))

    def begin(self, name: str, part: torch.Tensor) -> State:
        return {"exp_avg": torch.zeros_like(part), "exp_avg_sq": torch.zeros_like(part)}

    def prepare(self, slots: Sequence[Slot]) -> Update:
        filled = [slot for slot in slots if slot.weight.numel()]
        ready = [self.kernel and in_one_piece(slot) for slot in filled]
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
    """Prepare an update with torch's fused kernel."""
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
    """Return whether a slot meets the kernel's requirements: contiguous tensors, all float32 except the rounded
    weight."""
    tensors = (slot.weight, slot.gradient, slot.state["exp_avg"], slot.state["exp_avg_sq"])
    plain = all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    return plain and (slot.rounded is None or slot.rounded.is_contiguous())


def in_one_pass(slots: Sequence[Slot], options: AdamWOptions) -> Update:
    """Prepare an update with the Triton kernel, which reads and writes each number once."""
    from truestep.step.update.optimizers.adamw_kernel import Numbers, tables_of

    tables = tables_of(slots, options.betas)

    def update(rate: float, scale: float) -> None:
        for table in tables:
            table.update(Numbers(*options.betas, options.epsilon, rate * options.weight_decay, rate, scale))

    return update


@cache
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernel, with weights rounded to `dtype`, gives torch's results on a device."""
    if device.type != "cuda":
        return False
    what = "the kernel of optimizer.type: adamw"
    return serves(what, "torch's slower one is used", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a description of the first wrong result of the kernel, or None. Tests weights of several sizes, with and
    without rounding, and with and without 16-byte alignment."""
    options = AdamWOptions((0.9, 0.99), 1e-8, 0.1)
    plain, fused = (_some_slots(device, dtype) for _ in range(2))
    for slots, prepared in ((plain, in_passes), (fused, in_one_pass)):
        for _ in range(2):
            prepared([replace(slot, gradient=slot.gradient.clone()) for slot in slots], options)(1e-2, 0.3)
    for right, found in zip(plain, fused, strict=True):
        for name, state in found.state.items():
            if not torch.allclose(right.state[name], state, rtol=1e-5, atol=0):
                return f"{name} of {found.name}"
        if not torch.allclose(right.weight, found.weight, rtol=1e-5, atol=1e-7):
            return f"the weights of {found.name}"
        if found.rounded is not None and not torch.equal(found.rounded, found.weight.to(dtype)):
            return f"the rounded weights of {found.name}"
    return None


def _some_slots(device: torch.device, dtype: torch.dtype) -> list[Slot]:
    generator = torch.Generator().manual_seed(0)
    slots: list[Slot] = []
    for count in (1, 4096, 10_001, 70_000):
        for first in (0, 1):
            for rounds in (True, False):
                weight = torch.randn(first + count, generator=generator).to(device)[first:]
                state = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                gradient = weight.sin() * 10.0 ** (len(slots) % 5 - 4)
                rounded = torch.empty_like(weight, dtype=dtype) if rounds else None
                name = f"{count} numbers from number {first}{', rounded' if rounds else ''}"
                slots.append(Slot(name, 0, 1 + len(slots), weight, gradient, state, rounded))
    return slots
