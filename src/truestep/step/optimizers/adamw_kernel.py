"""One pass over many weights for AdamW (Triton): weights, gradients and moments are read, and weights and moments
written, and the weights once more in the type that the model computes in. A table has their addresses.

Dimensions: W weights, T tensors of each, P programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from truestep.step.optimizers.by_weight import Slot
from truestep.types import sent

_BLOCK = 4096  # numbers that a program works on
LINE = 16  # what begins at a multiple of so many bytes, and has a multiple of as many numbers, is read in wide pieces
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Numbers(NamedTuple):
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    rate: float
    scale: float  # of the gradients


@triton.jit
def _begin(own_pointer, number, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    begin = tl.load(own_pointer + number).to(tl.pointer_type(TYPE))
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    return begin


@triton.jit
def _update_kernel(
    # [W, T + 1] int64: where weight, gradient, first moment, second moment and rounded weight begin, and how many
    # numbers each has.
    table_pointer,
    sizes_pointer,  # [W, 2] float32: of the step, and the correction of the second moment's root
    work_pointer,  # [P, 2] int32: a weight, and a block of it
    scale,
    beta1,
    one_less_beta1,
    beta2,
    one_less_beta2,
    shrink,
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
    step_size = tl.load(sizes_pointer + 2 * number)
    correction = tl.load(sizes_pointer + 2 * number + 1)
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
    weight = tl.load(weights, mask=inside, other=0.0) * shrink
    weight = weight - step_size * tl.div_rn(first, divisor)
    tl.store(weights, weight, mask=inside)
    if TENSORS == 5:
        tl.store(_begin(own, 4, ROUNDED, ALIGNED) + place, weight.to(ROUNDED), mask=inside)


@lru_cache(maxsize=8)
def _work(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:  # [P, 2] int32
    """Divide weights of such sizes among programs."""
    blocks = [triton.cdiv(count, _BLOCK) for count in counts]
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), blocks)
    firsts = np.repeat(np.cumsum([0, *blocks[:-1]]), blocks)
    work = np.stack([owners, (np.arange(len(owners)) - firsts).astype(np.int32)], 1)
    return torch.from_numpy(work).to(device)


class Table:
    """Some weights to update, which are rounded to one type, or not: their addresses and sizes, on their device."""

    def __init__(self, slots: Sequence[Slot]):
        self._parts = [_Part(some) for some in _by_place(slots)]

    def update(self, numbers: Numbers) -> None:
        """Update weights and moments in place."""
        for part in self._parts:
            part.update(numbers)


def _tensors(slot: Slot) -> list[torch.Tensor]:
    rounded = [] if slot.rounded is None else [slot.rounded]
    return [slot.weight, slot.gradient, slot.state["exp_avg"], slot.state["exp_avg_sq"], *rounded]


def _by_place(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Sort slots into those that can be read in wide pieces and the others."""
    found: dict[bool, list[Slot]] = {True: [], False: []}
    for slot in slots:
        places = [tensor.data_ptr() for tensor in _tensors(slot)]
        found[all(number % LINE == 0 for number in (*places, slot.weight.numel()))].append(slot)
    return [some for some in found.values() if some]


class _Part:
    def __init__(self, slots: Sequence[Slot]):
        self._slots = slots  # whose memory the table points to
        first, *_ = slots
        rows = [[*(tensor.data_ptr() for tensor in _tensors(slot)), slot.weight.numel()] for slot in slots]
        self._aligned = all(number % LINE == 0 for number in rows[0])
        self._rounded = _TYPES[_tensors(first)[-1].dtype]
        self._device, self._width = first.weight.device, len(rows[0]) - 1
        with self._on_device():
            self._table = sent(torch.tensor(rows), self._device)
            self._work = _work(tuple(row[-1] for row in rows), self._device)

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def update(self, numbers: Numbers) -> None:
        beta1, beta2, epsilon, weight_decay, rate, scale = numbers
        sizes = {
            number: (rate / (1 - beta1**number), math.sqrt(1 - beta2**number))
            for number in {slot.number for slot in self._slots}
        }
        with self._on_device():
            _update_kernel[(len(self._work),)](
                self._table,
                sent(torch.tensor([sizes[slot.number] for slot in self._slots]), self._device),
                self._work, scale, beta1, 1 - beta1, beta2, 1 - beta2, 1 - rate * weight_decay, epsilon,
                TENSORS=self._width, ROUNDED=self._rounded, ALIGNED=self._aligned, BLOCK=_BLOCK, num_warps=8,
            )  # fmt: skip
