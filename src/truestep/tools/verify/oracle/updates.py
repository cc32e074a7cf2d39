"""Updates of whole weights in float64, as docs/optimizers.md defines them, and their float32 rounding.

An update is judged in two stages: the moments from the gradient and the earlier moments, then the weight from the
moments. Each stage starts from the run's own values, so an error shows in the stage that made it. A weight must be the
float32 number nearest to its exact value. Values before this last rounding have errors of float32 arithmetic, so each
has an interval.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-6  # error of a few float32 operations, relative to the absolute terms of the sum
_LEAST = 2e-38  # float32 values below about this size are subnormal and may be flushed to 0
_GROWTH = 3.4445  # largest factor by which a step of Muon's iteration amplifies an error
_UNIT = 2.0**-24  # half the distance between 1 and the next float32 number
_DECADES, _PARTS, _BLOCK = 5, 16, 256
_ROW, _COLUMN = 3_242_174_889, 2_447_445_414
# number of levels, and the factor of the update's number in rounding thresholds
_SIGNED, _POSITIVE = (127, 2_654_435_769), (255, 1_640_531_527)

State = Mapping[str, Tensor]  # optimizer state of a weight, by kind


class Interval(NamedTuple):
    low: Tensor
    high: Tensor


class Moment(NamedTuple):
    """The interval in which a moment must be after an update, and its value."""

    right: Interval
    found: Tensor
    size: Tensor  # sum of the absolute terms; errors are relative to it


class Change(NamedTuple):
    """What an update subtracts from a weight, without decay, and the allowed float32 error."""

    step: Tensor
    slack: Tensor


class Variant(NamedTuple):
    """A variant of AdamW's update: the right one, or one with a deliberate fault. A fault in a run is identified by the
    variant that reproduces its numbers."""

    first_correction: bool = True  # bias correction of the first moment
    second_correction: bool = True
    later: int = 0  # added to the number of the update
    epsilon: float | None = None  # None: the configured one
    epsilon_inside: bool = False  # epsilon inside the root


RIGHT = Variant()


class UpdateOracle:
    """The rules of a built-in optimizer."""

    def __init__(self, options: dict[str, Any], ends: Collection[str] = ()):
        """`ends`: the names of the embedding and the head, for which Muon uses AdamW."""
        self.options, self._ends = options, ends

    def decay(self, weight: Tensor) -> float:
        """Return the weight decay of a weight; 0 for vectors."""
        return float(self.options["weight_decay"]) if weight.ndim >= 2 else 0.0

    def rule(self, name: str, weight: Tensor) -> str:
        kind = str(self.options["type"])
        if kind == "adamw" or weight.ndim < 2 or (kind == "muon" and name in self._ends):
            return "adamw"
        return kind

    def moments(
        self, name: str, weight: Tensor, gradient: Tensor, before: State, after: State, number: int
    ) -> dict[str, Moment]:
        """Compute the moments after update `number` from the earlier moments and the gradient; also return the run's
        own moments."""
        rule = self.rule(name, weight)
        if rule == "muon":
            return {"momentum_buffer": _mean(gradient, before, after, "momentum_buffer", self.options["momentum"])}
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        if rule == "adamw":
            return {
                "exp_avg": _mean(gradient, before, after, "exp_avg", beta1),
                "exp_avg_sq": _mean(gradient.square(), before, after, "exp_avg_sq", beta2),
            }
        first, root, slack = self._new_moments(gradient, before)
        turns = [_turns(weight.shape, number, factor) for _, factor in (_SIGNED, _POSITIVE)]
        around = Interval(first - slack, first + slack)
        around_root = Interval(root * (1 - _ROUNDING), root * (1 + _ROUNDING))
        return {
            "exp_avg": Moment(
                stored(around, turns[0], _SIGNED[0], keeps_small=False), read_state(after, "exp_avg"), slack / _ROUNDING
            ),
            "exp_avg_root": Moment(
                stored(around_root, turns[1], _POSITIVE[0], keeps_small=True), read_state(after, "exp_avg_root"), root
            ),
        }

    def change(
        self,
        name: str,
        weight: Tensor,
        gradient: Tensor,
        before: State,
        after: State,
        number: int,
        rate: float,
        variant: Variant = RIGHT,
    ) -> Change:
        """Compute what update `number` subtracts from the weight at this rate, from the run's own moments."""
        rule = self.rule(name, weight)
        if rule == "muon":
            return self._orthogonal_change(weight, gradient, after, rate)
        if rule == "adamw":
            first, root = after["exp_avg"].double(), after["exp_avg_sq"].double().sqrt()
            slack = _ROUNDING * first.abs()
        else:  # 8-bit AdamW updates the weight with the moments before they are quantised
            first, root, slack = self._new_moments(gradient, before)
            slack = slack + _ROUNDING * first.abs()
        options, number = self.options, number + variant.later
        epsilon = options["epsilon"] if variant.epsilon is None else variant.epsilon
        corrected = root / math.sqrt(1 - options["beta2"] ** number) if variant.second_correction else root
        divisor = (corrected.square() + epsilon).sqrt() if variant.epsilon_inside else corrected + epsilon
        size = rate / (1 - options["beta1"] ** number) if variant.first_correction else rate
        divisor = divisor.clamp(min=1e-300)
        return Change(size * first / divisor, size * slack / divisor)

    def _new_moments(self, gradient: Tensor, before: State) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the moments of 8-bit AdamW before they are quantised: the first moment, the root of the second, and
        the allowed float32 error of the first."""
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        old, old_root = (
            read_state(before, kind) if before else torch.zeros_like(gradient) for kind in ("exp_avg", "exp_avg_root")
        )
        first = beta1 * old + (1 - beta1) * gradient
        root = (beta2 * old_root.square() + (1 - beta2) * gradient.square()).sqrt()
        return first, root, _ROUNDING * (beta1 * old.abs() + (1 - beta1) * gradient.abs())

    def _orthogonal_change(self, weight: Tensor, gradient: Tensor, after: State, rate: float) -> Change:
        options, average = self.options, after["momentum_buffer"].double()
        momentum = options["momentum"]
        direction = (1 - momentum) * gradient + momentum * average if options["nesterov"] else average
        matrices = direction.reshape(-1, *direction.shape[-2:])
        made = torch.stack([orthogonal(matrix, options["ns_steps"]) for matrix in matrices]).reshape(weight.shape)
        rows, columns = weight.shape[-2:]
        factor = max(1.0, rows / columns) ** 0.5 if options["adjust"] == "original" else 0.2 * max(rows, columns) ** 0.5
        # The iteration starts with a matrix of norm 1. Each step rounds a few times, and amplifies earlier errors.
        error = 4 * _UNIT * sum(_GROWTH**passed for passed in range(options["ns_steps"] + 1))
        return Change(rate * factor * made, torch.full_like(made, rate * factor * error))


def _mean(value: Tensor, before: State, after: State, kind: str, beta: float) -> Moment:
    old = before[kind].double() if before else torch.zeros_like(value)
    right = beta * old + (1 - beta) * value
    return Moment(Interval(right, right), after[kind].double(), beta * old.abs() + (1 - beta) * value.abs() + _LEAST)


def beyond(moment: Moment) -> float:
    """Return the norm of a moment's distance from its interval, relative to the norm of its size."""
    low, high = moment.right
    outside = (moment.found - torch.minimum(torch.maximum(moment.found, low), high)).norm()
    return float(outside / moment.size.norm().clamp(min=_LEAST))


def half_unit(values: Tensor) -> Tensor:
    """Return half the distance between neighbouring float32 numbers of this size."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - 25)


def updated(weight: Tensor, rate: float, decay: float, change: Change) -> Interval:
    """Return the interval of float32 numbers that a weight may have after an update.

    Decay may be rounded in several ways: together with the change or before it, and as a product with a rounded factor
    or as a difference. At a small learning rate these give different numbers. A compiler may also fuse two operations.
    """
    exact = weight * (1 - rate * decay)
    decayed = [exact]
    if decay:
        factor = float(torch.tensor(1 - rate * decay, dtype=torch.float32))
        taken = (rate * decay * weight).float().double()
        decayed += [weight * factor, _float32(weight * factor), _float32(exact), _float32(weight - taken)]
    slack = change.slack + _UNIT * rate * decay * weight.abs()
    low, high = torch.stack(decayed).amin(0) - change.step - slack, torch.stack(decayed).amax(0) - change.step + slack
    return Interval(_float32(low), _float32(high))


def _float32(values: Tensor) -> Tensor:
    return values.float().double()


def read_state(state: State, kind: str) -> Tensor:
    """Dequantise a state that is stored in 8 bits: a level for each number, and a scale for each block."""
    codes = state[kind].double()
    flat, scales = (value.double().reshape(-1, value.shape[-1]) for value in (codes, state[f"{kind}_largest"]))
    result = torch.zeros_like(flat)
    table = _levels(_POSITIVE[0] if kind == "exp_avg_root" else _SIGNED[0])
    for number, block in enumerate(blocks_of(flat.shape[-1])):
        here = slice(block.start, block.stop)
        result[:, here] = scales[:, number : number + 1] * table[flat[:, here].abs().long()] * flat[:, here].sign()
    return result.reshape(codes.shape)


def _levels(count: int) -> Tensor:
    return torch.tensor(
        [0.0, *(10 ** (_DECADES * (place / (count - 1) - 1)) for place in range(count))], dtype=torch.float64
    )


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Apply x -> a x + (b x xᵀ + c (x xᵀ)²) x `steps` times, beginning with the matrix divided by its norm."""
    result = matrix / max(float(matrix.square().sum()) ** 0.5, 1e-7)
    for _ in range(steps):
        product = result @ result.T @ result
        result = 3.4445 * result - 4.7750 * product + 2.0315 * (result @ result.T @ product)
    return result


def blocks_of(columns: int) -> list[range]:
    """Return the columns of each block of a row. The row is divided into 16 (or fewer) equal parts, and each part into
    blocks of equal size, at most 256. The last block of a part may be shorter."""
    parts = math.gcd(columns, _PARTS)
    length = columns // parts
    size = math.ceil(length / math.ceil(length / _BLOCK))
    return [
        range(part * length + start, part * length + min(start + size, length))
        for part in range(parts)
        for start in range(0, length, size)
    ]


def _turns(shape: torch.Size, number: int, factor: int) -> Tensor:
    height = math.prod(shape[:-1])
    rows = torch.tensor([(row * _ROW + number * factor + 2**31) % 2**32 for row in range(height)])
    columns = torch.tensor([column * _COLUMN % 2**32 for column in range(shape[-1])])
    whole = (rows[:, None] + columns[None, :]) % 2**32
    return (whole // 256).double().reshape(shape) / 2**24


def stored(values: Interval, turns: Tensor, count: int, *, keeps_small: bool) -> Interval:
    """Return the interval of numbers after quantisation to 8 bits. `turns`: each number's threshold for rounding up,
    from 0 to 1. `count`: number of levels. `keeps_small`: positive numbers are not rounded to 0."""
    low, high = (bound.reshape(-1, bound.shape[-1]) for bound in values)
    turns = turns.reshape(low.shape)
    least, most = torch.empty_like(low), torch.empty_like(high)
    for block in blocks_of(low.shape[-1]):
        here = slice(block.start, block.stop)
        one, other, turn = low[:, here], high[:, here], turns[:, here]
        sizes = torch.where((one <= 0) & (other >= 0), 0.0, torch.minimum(one.abs(), other.abs()))
        smallest = sizes.amax(-1, keepdim=True)  # smallest possible scale of the block
        largest = torch.maximum(one.abs(), other.abs()).amax(-1, keepdim=True)

        def read(size: Tensor, scale: Tensor, over: Tensor, turn: Tensor = turn) -> Tensor:
            share = (size / over.clamp(min=1e-300)).clamp(max=1.0)
            return scale * _level(share, turn, count, keeps_small)

        least[:, here] = torch.where(one >= 0, read(one, smallest, largest), -read(-one, largest, smallest))
        most[:, here] = torch.where(other >= 0, read(other, largest, smallest), -read(-other, smallest, largest))
    return Interval(least.reshape(values.low.shape), most.reshape(values.high.shape))


def _level(share: Tensor, turn: Tensor, count: int, keeps_small: bool) -> Tensor:
    """Round a fraction of the scale to one of the two neighbouring levels: up if `turn` is less than its relative
    position between them, else down."""
    share = share.clamp(min=0.0)
    table = _levels(count)
    below = (torch.searchsorted(table, share, right=True) - 1).clamp(0, count - 1)
    place = (share - table[below]) / (table[below + 1] - table[below])
    chosen = below + (turn < place)
    if keeps_small:
        chosen = torch.where(share > 0, chosen.clamp(min=1), 0)
    return table[chosen]
