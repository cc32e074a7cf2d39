"""One pass over many weights for AdamW (Triton): weights, gradients and moments are read, and weights and moments
written, and the weights once more in the type that the model computes in. A table has their addresses.

Dimensions: W weights, T tensors of each, P programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

_BLOCK = 4096  # numbers that a program works on
_LINE = 16  # what begins at a multiple of so many bytes, and has a multiple of as many numbers, is read in wide pieces
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Update(NamedTuple):
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
    # [W, T + 2] int64: where weight, gradient, first moment, second moment and rounded weight begin; how many numbers
    # each has; and two float32: the size of the step, and the correction of the second moment's root.
    table_pointer,
    sizes_pointer,  # the same as float32
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
    own = table_pointer + number * (TENSORS + 2)
    sizes = sizes_pointer + 2 * (number * (TENSORS + 2) + TENSORS + 1)
    step_size = tl.load(sizes)
    correction = tl.load(sizes + 1)
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


def update_(tensors: Sequence[Sequence[torch.Tensor]], numbers: Sequence[int], update: Update) -> None:
    """Update weights and moments in place. Each weight has four tensors or, if it is rounded, five; all have as many.
    `numbers`: of each weight's updates, from 1."""
    rows: dict[bool, list[tuple[list[int], int, float, float]]] = {True: [], False: []}
    for own, number in zip(tensors, numbers, strict=True):
        addresses = [tensor.data_ptr() for tensor in own]
        step_size, correction = update.rate / (1 - update.beta1**number), math.sqrt(1 - update.beta2**number)
        aligned = all(number % _LINE == 0 for number in (*addresses, own[0].numel()))
        rows[aligned].append((addresses, own[0].numel(), step_size, correction))
    for aligned, some in rows.items():
        if some:
            _launch(some, update, aligned, tensors[0][0].device, tensors[0][-1].dtype)


def _launch(
    rows: list[tuple[list[int], int, float, float]],
    update: Update,
    aligned: bool,
    device: torch.device,
    rounded: torch.dtype,
) -> None:
    width = len(rows[0][0])
    on_host = torch.empty(len(rows), width + 2, dtype=torch.int64, pin_memory=device.type == "cuda")
    on_host[:, : width + 1] = torch.tensor([[*addresses, count] for addresses, count, *_ in rows])
    on_host.view(torch.float32)[:, -2:] = torch.tensor([row[2:] for row in rows])
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        table = on_host.to(device, non_blocking=True)
        work = _work(tuple(count for _, count, *_ in rows), device)
        _update_kernel[(len(work),)](
            table, table.view(torch.float32), work,
            update.scale, update.beta1, 1 - update.beta1, update.beta2, 1 - update.beta2,
            1 - update.rate * update.weight_decay, update.epsilon,
            TENSORS=width, ROUNDED=_TYPES[rounded], ALIGNED=aligned, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
