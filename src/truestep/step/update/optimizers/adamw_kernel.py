"""AdamW over many weights in one kernel (Triton): reads weights, gradients and moments; writes weights, moments and the
weights rounded to the model's dtype. A table holds the addresses of all tensors.

Dimensions: W weights, T tensors of each, P programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from truestep.gpu.operators import on_device
from truestep.step.update.optimizers.by_weight import Slot
from truestep.types import sent

_BLOCK = 4096  # elements per program
LINE = 16  # tensors with aligned addresses (bytes) and lengths (elements) are read with vector loads
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Numbers(NamedTuple):
    beta1: float
    beta2: float
    epsilon: float
    decay: float  # subtracted share of the weight in this update: learning rate x weight decay
    rate: float
    scale: float  # factor of the gradients


@triton.jit
def _begin(own_pointer, number, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    begin = tl.load(own_pointer + number).to(tl.pointer_type(TYPE))
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    return begin


@triton.jit
def _update_kernel(
    # [W, T + 1] int64: the addresses of weight, gradient, first moment, second moment and rounded weight, then the
    # number of elements.
    table_pointer,
    corrections_pointer,  # [W, 2] float32: bias corrections of the first moment, and of the square root of the second
    work_pointer,  # [P, 2] int32: index of a weight, and of a block in it
    scale,
    beta1,
    one_less_beta1,
    beta2,
    one_less_beta2,
    decay,
    rate,
    epsilon,
    TENSORS: tl.constexpr,
    ROUNDED: tl.constexpr,  # the type of the rounded weight
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(work_pointer + 2 * program)
    block = tl.load(work_pointer + 2 * program + 1)
    own = table_pointer + number * (TENSORS + 1)
    step_size = rate * tl.load(corrections_pointer + 2 * number)
    correction = tl.load(corrections_pointer + 2 * number + 1)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(own + TENSORS)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    inside = place < count

    weights = _begin(own, 0, tl.float32, ALIGNED) + place
    firsts = _begin(own, 2, tl.float32, ALIGNED) + place
    seconds = _begin(own, 3, tl.float32, ALIGNED) + place
    gradient = tl.load(_begin(own, 1, tl.float32, ALIGNED) + place, mask=inside, other=0.0) * scale
    first = tl.load(firsts, mask=inside, other=0.0) * beta1 + gradient * one_less_beta1
    second = tl.load(seconds, mask=inside, other=0.0) * beta2 + gradient * gradient * one_less_beta2
    tl.store(firsts, first, mask=inside)
    tl.store(seconds, second, mask=inside)
    divisor = tl.div_rn(tl.sqrt_rn(second), correction) + epsilon
    # Not weight · (1 - decay): with a tiny decay, 1 - decay would be rounded in the same way at every update.
    weight = tl.load(weights, mask=inside, other=0.0)
    weight = weight - (decay * weight + step_size * tl.div_rn(first, divisor))
    tl.store(weights, weight, mask=inside)
    if TENSORS == 5:
        tl.store(_begin(own, 4, ROUNDED, ALIGNED) + place, weight.to(ROUNDED), mask=inside)


@cache
def _work(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:  # [P, 2] int32
    """Divide weights of the given sizes into blocks, one for each program."""
    blocks = [triton.cdiv(count, _BLOCK) for count in counts]
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), blocks)
    firsts = np.repeat(np.cumsum([0, *blocks[:-1]]), blocks)
    work = np.stack([owners, (np.arange(len(owners)) - firsts).astype(np.int32)], 1)
    return sent(torch.from_numpy(work), device)


def tables_of(slots: Sequence[Slot], betas: tuple[float, float]) -> list[Table]:
    """Make tables of weights, one for each combination of rounded dtype and alignment."""
    kinds: dict[tuple[torch.dtype | None, bool], list[tuple[Slot, list[int]]]] = {}
    for slot in slots:
        rounded = [] if slot.rounded is None else [slot.rounded]
        tensors = [slot.weight, slot.gradient, slot.state["exp_avg"], slot.state["exp_avg_sq"], *rounded]
        row = [*(tensor.data_ptr() for tensor in tensors), slot.weight.numel()]
        kind = None if slot.rounded is None else slot.rounded.dtype, all(number % LINE == 0 for number in row)
        kinds.setdefault(kind, []).append((slot, row))
    return [Table(some, dtype, aligned, betas) for (dtype, aligned), some in kinds.items()]


class Table:
    """Addresses, sizes and bias corrections of the weights that one kernel updates, on their device."""

    def __init__(
        self,
        rows: Sequence[tuple[Slot, list[int]]],
        rounded: torch.dtype | None,
        aligned: bool,
        betas: tuple[float, float],
    ):
        self._slots = [slot for slot, _ in rows]  # keeps the memory alive that the table points to
        self._device = self._slots[0].weight.device
        self._rounded, self._aligned = rounded, aligned
        corrections = {
            number: (1 / (1 - betas[0] ** number), math.sqrt(1 - betas[1] ** number))
            for number in {slot.number for slot in self._slots}
        }
        with on_device(self._device):
            self._table = sent(torch.tensor([row for _, row in rows]), self._device)
            self._corrections = sent(torch.tensor([corrections[slot.number] for slot in self._slots]), self._device)
            self._work = _work(tuple(slot.weight.numel() for slot in self._slots), self._device)

    def update(self, numbers: Numbers) -> None:
        """Update weights and moments in place."""
        beta1, beta2, epsilon, decay, rate, scale = numbers
        with on_device(self._device):
            _update_kernel[(len(self._work),)](
                self._table, self._corrections, self._work,
                scale, beta1, 1 - beta1, beta2, 1 - beta2, decay, rate, epsilon,
                TENSORS=4 if self._rounded is None else 5, ROUNDED=_TYPES[self._rounded or torch.float32],
                ALIGNED=self._aligned, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=True,
            )  # fmt: skip
