"""AdamW with both moments in 8 bits: quantised levels, and a float32 scale for each block.

A block is at most 256 consecutive elements of a row (the last dimension) of the whole weight. It never crosses a
boundary between sixteenths of the row. Ranks cut weights between rows, or cut rows into equal parts. So each block is
on one rank, and the blocks of a weight are the same under every layout.

Levels are geometric, over five powers of ten below the block's largest number: 127 levels and a sign for the first
moment, 255 levels for the square root of the second. A number is rounded to its lower or upper level so that rounding
errors average out (dithering). Rounding to the nearest would freeze the second moment: it changes by about 0.1% a step,
while its levels are 5% apart. The rounding threshold depends only on the element's index in the weight and on the
update's number, so results are deterministic.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import torch

from truestep.errors import TruestepError
from truestep.gpu.self_test import serves
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.step.update.optimizers.by_weight import Slot, State, Update, round_weights, scale_gradients
from truestep.weights.blocks import PARTS, ScaleBlocks
from truestep.weights.protocol import Weights

DECADES = 5.0
FIRST, SECOND = 127, 255  # levels above 0
# Rounding thresholds are the fractional parts of row · A + column · B + update · C. Over many updates, the thresholds
# of an element cover [0, 1) evenly; those of neighbouring elements differ. The factors are the golden ratio and its
# two-dimensional generalisation, times 2^32.
ROW, COLUMN = 3_242_174_889, 2_447_445_414
STEPS = {FIRST: 2_654_435_769, SECOND: 1_640_531_527}


class BlockError(TruestepError):
    """Raised for a layout that would cut a block of a weight."""


class Quantised(NamedTuple):
    """A moment in 8 bits."""

    codes: torch.Tensor  # [R, C], whole numbers
    scale: torch.Tensor  # [R, blocks], float32


@cache
def levels(count: int, device: torch.device) -> torch.Tensor:
    """Return a table of 0 and `count` geometric levels up to 1."""
    values = [0.0, *(10 ** (DECADES * (place / (count - 1) - 1)) for place in range(count))]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(device)


def turns(rows: torch.Tensor, columns: torch.Tensor, number: int, count: int) -> torch.Tensor:  # [R, C]
    """Return each element's rounding threshold in [0, 1): it selects the lower or the upper level."""
    along_rows, along_columns = rows * ROW + number * STEPS[count], columns * COLUMN
    sums = _wrapped(along_rows)[:, None] + _wrapped(along_columns)[None, :]  # int32, which wraps
    return (sums >> 8).to(torch.float32) * 2.0**-24 + 0.5


def _wrapped(values: torch.Tensor) -> torch.Tensor:
    return (((values + 2**31) & (2**32 - 1)) - 2**31).to(torch.int32)


def quantise(values: torch.Tensor, blocks: ScaleBlocks, turn: torch.Tensor, count: int) -> Quantised:
    """Quantise values [R, C]. In the second moment (`count` = SECOND), nonzero values never become 0."""
    folded = blocks.fold(values.abs())
    scale = folded.amax(-1)
    share = blocks.unfold(folded / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    table = levels(count, values.device)
    place = torch.floor(torch.log10(share) * ((count - 1) / DECADES)) + count
    below = place.clamp(0, count - 1).to(torch.int32).flatten()
    low = table.index_select(0, below).view_as(share)
    high = table.index_select(0, below + 1).view_as(share)
    codes = below.view_as(share) + (turn < (share - low) / (high - low))
    if count == SECOND:
        codes = codes.clamp_(min=1).masked_fill_(share == 0, 0)
        return Quantised(codes.to(torch.uint8), scale)
    return Quantised((codes * values.sign()).to(torch.int8), scale)


def dequantise(stored: Quantised, blocks: ScaleBlocks, count: int) -> torch.Tensor:  # [R, C]
    codes = stored.codes.to(torch.int32)
    values = levels(count, codes.device).index_select(0, codes.abs().flatten()).view_as(codes)
    scaled = blocks.unfold(blocks.fold(values) * stored.scale[..., None])
    return scaled * codes.sign() if count == FIRST else scaled


def empty_state(part: torch.Tensor, blocks: ScaleBlocks) -> State:
    """Return the state of a part of a weight before its first update."""
    largest = torch.zeros((*part.shape[:-1], blocks.of_row(part.shape[-1])), dtype=torch.float32, device=part.device)
    return {
        "exp_avg": torch.zeros_like(part, dtype=torch.int8),
        "exp_avg_largest": largest,
        "exp_avg_root": torch.zeros_like(part, dtype=torch.uint8),
        "exp_avg_root_largest": largest.clone(),
    }


@dataclass(frozen=True)
class AdamW8Bit:
    """The update rule of AdamW with 8-bit moments."""

    weights: Weights
    options: AdamWOptions
    kernel: bool = False  # use the Triton kernel; the same on every rank
    together: int = 0
    _known_places: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def begin(self, name: str, part: torch.Tensor) -> State:
        return empty_state(part, self._blocks(name))

    def _blocks(self, name: str) -> ScaleBlocks:
        return ScaleBlocks.of(self.weights.pieces[name].shape[-1])

    def prepare(self, slots: Sequence[Slot]) -> Update:
        return partial(self._update, slots)

    def _update(self, slots: Sequence[Slot], rate: float, scale: float) -> None:
        for slot in slots:
            if slot.weight.numel():
                self._update_one(slot, rate, scale)

    def _update_one(self, slot: Slot, rate: float, scale: float) -> None:
        flat = {kind: value.reshape(-1, value.shape[-1]) for kind, value in slot.state.items()}
        weight, gradient = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (slot.weight, slot.gradient))
        here = (slot.name, slot.start)
        if here not in self._known_places:
            self._known_places[here] = self._places(slot)
        matrix = Matrix(weight, gradient, flat, self._blocks(slot.name), *self._known_places[here], slot.number)
        rounded = slot.rounded
        if self.kernel and matrix.in_one_piece and (rounded is None or rounded.is_contiguous()):
            in_one_pass(matrix, self.options, rate, scale, rounded)
            return
        scale_gradients([slot], scale)
        in_passes(matrix, self.options, rate)
        round_weights([slot])

    def _places(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row and column indices of the slot's elements in the whole weight."""
        shape = self.weights.pieces[slot.name].shape
        height, width = math.prod(shape[:-1]), shape[-1]
        rows = torch.arange(height).reshape(*shape[:-1], 1).expand(shape)
        columns = torch.arange(width).expand(shape)
        stop = slot.start + len(slot.weight)
        own = self.weights.part_of(slot.name, rows)[slot.start : stop].select(-1, 0).flatten()
        across = self.weights.part_of(slot.name, columns)[slot.start : stop].flatten(0, -2)[0]
        return own.to(slot.weight.device), across.to(slot.weight.device)


@dataclass(frozen=True)
class Matrix:
    """A weight, its gradient and its state for one update, as matrices. For stacked experts, the rows of all experts
    are concatenated."""

    weight: torch.Tensor  # [R, C]
    gradient: torch.Tensor  # [R, C]
    state: State
    blocks: ScaleBlocks
    rows: torch.Tensor  # [R] indices in the whole weight
    columns: torch.Tensor  # [C]
    number: int  # number of the update, from 1

    @property
    def in_one_piece(self) -> bool:
        return all(tensor.is_contiguous() for tensor in (self.weight, self.gradient, *self.state.values()))


def in_passes(matrix: Matrix, options: AdamWOptions, rate: float) -> None:
    """Update with torch operations, each a pass over the matrix."""
    state, blocks, number = matrix.state, matrix.blocks, matrix.number
    (beta1, beta2), gradient = options.betas, matrix.gradient
    first = dequantise(Quantised(state["exp_avg"], state["exp_avg_largest"]), blocks, FIRST)
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second = dequantise(Quantised(state["exp_avg_root"], state["exp_avg_root_largest"]), blocks, SECOND)
    second.square_().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = second.sqrt_()
    matrix.weight.mul_(1 - rate * options.weight_decay)
    divisor = (root / math.sqrt(1 - beta2**number)).add_(options.epsilon)
    matrix.weight.addcdiv_(first, divisor, value=-rate / (1 - beta1**number))
    for kind, values, count in (("exp_avg", first, FIRST), ("exp_avg_root", root, SECOND)):
        stored = quantise(values, blocks, turns(matrix.rows, matrix.columns, number, count), count)
        state[kind].copy_(stored.codes)
        state[f"{kind}_largest"].copy_(stored.scale)


def in_one_pass(
    matrix: Matrix, options: AdamWOptions, rate: float, scale: float = 1.0, rounded: torch.Tensor | None = None
) -> None:
    """Update with the Triton kernel, which reads and writes each number once. The gradient is multiplied by `scale`.
    The rounded weight is written to `rounded` if given."""
    from truestep.step.update.optimizers.eight_bits_kernel import update_

    state, number, device = matrix.state, matrix.number, matrix.weight.device
    first_rows, root_rows = (_wrapped(matrix.rows * ROW + number * STEPS[count]) for count in (FIRST, SECOND))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        update_(
            matrix.weight,
            matrix.gradient,
            (state["exp_avg"], state["exp_avg_largest"]),
            (state["exp_avg_root"], state["exp_avg_root_largest"]),
            matrix.blocks,
            (levels(FIRST, device), levels(SECOND, device)),
            (first_rows, root_rows, _wrapped(matrix.columns * COLUMN)),
            DECADES,
            options.betas,
            scale,
            rounded,
            decay=rate * options.weight_decay,
            step_size=rate / (1 - options.betas[0] ** number),
            correction=math.sqrt(1 - options.betas[1] ** number),
            epsilon=options.epsilon,
        )


@cache
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernel, with weights rounded to `dtype`, gives the results of `in_passes` on a
    device."""
    if device.type != "cuda":
        return False
    what = "the kernel of optimizer.type: adamw_8bit"
    return serves(what, "torch's slower operations are used", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a description of the first wrong result of the kernel, or None. Tests rows with many and with few blocks,
    some of which are shorter than others."""
    generator = torch.Generator().manual_seed(0)
    options = AdamWOptions((0.9, 0.99), 1e-8, 0.1)
    for rows, columns in ((5, 16 * 300), (3, 7), (2, 2048)):
        blocks = ScaleBlocks.of(columns)
        start = torch.randn(rows, columns, generator=generator).to(device)
        found = []
        rounded = torch.empty_like(start, dtype=dtype)
        # The kernel gets twice the gradient and a scale of 0.5, to test the scale.
        for times, update in ((1, in_passes), (2, partial(in_one_pass, scale=0.5, rounded=rounded))):
            weight, state = start.clone(), empty_state(start, blocks)
            places = torch.arange(rows, device=device), torch.arange(columns, device=device)
            for number in (1, 2):
                gradient = times * (start * number).sin() * torch.logspace(-9, 3, columns, device=device)
                update(Matrix(weight, gradient, state, blocks, *places, number), options, 1e-2)
                found.append({"weight": weight.clone(), **{kind: value.clone() for kind, value in state.items()}})
        if not torch.equal(rounded, found[-1]["weight"].to(rounded.dtype)):
            return f"rounded weights in rows of {columns}"
        for name in found[0]:  # compare after the first update: later ones amplify a code that differs by one
            plain, fused = found[0][name].double(), found[2][name].double()
            if name in ("exp_avg", "exp_avg_root"):
                off = (plain - fused).abs()
                if float(off.max()) > 1 or float((off > 0).double().mean()) > 0.01:
                    return f"codes of {name} in rows of {columns}"
            elif not torch.allclose(plain, fused, rtol=1e-5, atol=1e-7):
                return f"{name} in rows of {columns}"
        if float((found[1]["weight"] - found[3]["weight"]).abs().max()) > 5e-3:  # one level, with a step size of 1e-2
            return f"the second update of rows of {columns}"
    return None


def check_blocks(weights: Weights, names: Iterable[str]) -> None:
    """Raise if a layout cuts a weight's rows inside blocks."""
    for name in names:
        piece = weights.pieces[name]
        columns = piece.shape[-1]
        for axis, dimension in piece.cut.items():
            if dimension == len(piece.shape) - 1 and math.gcd(columns, PARTS) % weights.ranks.size_of(axis):
                raise BlockError(
                    f"optimizer.type: adamw_8bit: parallel.{axis}: {weights.ranks.size_of(axis)} cuts the "
                    f"{columns} columns of {name} within blocks, which would change results: use a divisor of "
                    f"{math.gcd(columns, PARTS)}, or optimizer.type: adamw"
                )
