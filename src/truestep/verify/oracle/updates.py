"""Updates of whole weights in float64, as docs/optimizers.md defines them.

A rule gives bounds between which a weight must lie. They are one number for AdamW and Muon. With moments in 8 bits they
are two where float32 rounding decides which level a moment is stored as.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

Bounds = tuple[Tensor, Tensor]  # the least and the greatest value that is right
_ROUNDING = 1e-6  # of a moment, relative to the terms it is the sum of
_DECADES, _PARTS, _BLOCK = 5, 16, 256
_ROW, _COLUMN = 3_242_174_889, 2_447_445_414
_SIGNED, _POSITIVE = (127, 2_654_435_769), (255, 1_640_531_527)  # levels, and the factor of the update's number


class Interval(NamedTuple):
    low: Tensor
    high: Tensor


class UpdateOracle:
    """The state of a built-in optimizer over the weights of a run."""

    def __init__(self, options: dict[str, Any], ends: Collection[str]):
        """`ends`: the names of the embedding and of the head."""
        self._options, self._ends, self._number = options, ends, 0
        self._moments: dict[str, tuple[Any, Any]] = {}

    def step(self, weights: dict[str, Tensor], gradients: dict[str, Tensor], rate: float) -> dict[str, Bounds]:
        """Update all weights once, from where they are."""
        self._number += 1
        kind = self._options["type"]
        expected = {}
        for name, weight in weights.items():
            if kind == "adamw_8bit" and weight.ndim >= 2:
                expected[name] = self._adamw_8bit(name, weight, gradients[name], rate)
                continue
            muon = kind == "muon" and weight.ndim >= 2 and name not in self._ends
            rule = self._muon if muon else self._adamw
            value = rule(name, weight, gradients[name], rate)
            expected[name] = value, value
        return expected

    def _decayed(self, weight: Tensor, rate: float) -> Tensor:
        return weight * (1 - rate * (self._options["weight_decay"] if weight.ndim >= 2 else 0.0))

    def _adamw_change(self, first: Tensor, second: Tensor, rate: float) -> Tensor:
        options, number = self._options, self._number
        corrected = (second / (1 - options["beta2"] ** number)).sqrt() + options["epsilon"]
        return rate * (first / (1 - options["beta1"] ** number)) / corrected

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, rate: float) -> Tensor:
        beta1, beta2 = self._options["beta1"], self._options["beta2"]
        first, second = self._moments.get(name, (torch.zeros_like(gradient), torch.zeros_like(gradient)))
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient.square()
        self._moments[name] = (first, second)
        return self._decayed(weight, rate) - self._adamw_change(first, second, rate)

    def _muon(self, name: str, weight: Tensor, gradient: Tensor, rate: float) -> Tensor:
        options = self._options
        momentum = options["momentum"]
        average, _ = self._moments.get(name, (torch.zeros_like(gradient), None))
        average = momentum * average + (1 - momentum) * gradient
        self._moments[name] = (average, None)
        direction = (1 - momentum) * gradient + momentum * average if options["nesterov"] else average
        matrices = direction.reshape(-1, *direction.shape[-2:])
        made = torch.stack([orthogonal(matrix, options["ns_steps"]) for matrix in matrices]).reshape(weight.shape)
        rows, columns = weight.shape[-2:]
        factor = max(1.0, rows / columns) ** 0.5 if options["adjust"] == "original" else 0.2 * max(rows, columns) ** 0.5
        return self._decayed(weight, rate) - rate * factor * made

    def _adamw_8bit(self, name: str, weight: Tensor, gradient: Tensor, rate: float) -> Bounds:
        beta1, beta2 = self._options["beta1"], self._options["beta2"]
        zero = Interval(torch.zeros_like(gradient), torch.zeros_like(gradient))
        old, root = self._moments.get(name, (zero, zero))
        slack = _ROUNDING * (beta1 * torch.maximum(old.low.abs(), old.high.abs()) + (1 - beta1) * gradient.abs())
        first = Interval(*(beta1 * bound + (1 - beta1) * gradient for bound in old))
        new_root = Interval(*((beta2 * bound.square() + (1 - beta2) * gradient.square()).sqrt() for bound in root))
        changes = torch.stack([self._adamw_change(f, r.square(), rate) for f in first for r in new_root])
        decayed = self._decayed(weight, rate)
        turns = [_turns(weight.shape, self._number, factor) for _, factor in (_SIGNED, _POSITIVE)]
        wider = Interval(first.low - slack, first.high + slack)
        wider_root = Interval(new_root.low * (1 - _ROUNDING), new_root.high * (1 + _ROUNDING))
        self._moments[name] = (
            stored(wider, turns[0], _SIGNED[0], keeps_small=False),
            stored(wider_root, turns[1], _POSITIVE[0], keeps_small=True),
        )
        return decayed - changes.amax(0), decayed - changes.amin(0)


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Apply x -> a x + (b x xᵀ + c (x xᵀ)²) x so many times, from the matrix over its norm."""
    result = matrix / max(float(matrix.square().sum()) ** 0.5, 1e-7)
    for _ in range(steps):
        product = result @ result.T @ result
        result = 3.4445 * result - 4.7750 * product + 2.0315 * (result @ result.T @ product)
    return result


def blocks_of(columns: int) -> list[range]:
    """List the columns of each block of a row: its sixteenths (or fewer parts, all equal), each in blocks of one size,
    of which the last may be shorter."""
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
    """Give what is read again of numbers that were stored in 8 bits."""
    low, high = (bound.reshape(-1, bound.shape[-1]) for bound in values)
    turns = turns.reshape(low.shape)
    least, most = torch.empty_like(low), torch.empty_like(high)
    for block in blocks_of(low.shape[-1]):
        here = slice(block.start, block.stop)
        one, other, turn = low[:, here], high[:, here], turns[:, here]
        sizes = torch.where((one <= 0) & (other >= 0), 0.0, torch.minimum(one.abs(), other.abs()))
        smallest = sizes.amax(-1, keepdim=True)  # that the scale may be
        largest = torch.maximum(one.abs(), other.abs()).amax(-1, keepdim=True)

        def read(size: Tensor, scale: Tensor, over: Tensor, turn: Tensor = turn) -> Tensor:
            share = (size / over.clamp(min=1e-300)).clamp(max=1.0)
            return scale * _level(share, turn, count, keeps_small)

        least[:, here] = torch.where(one >= 0, read(one, smallest, largest), -read(-one, largest, smallest))
        most[:, here] = torch.where(other >= 0, read(other, largest, smallest), -read(-other, smallest, largest))
    return Interval(least.reshape(values.low.shape), most.reshape(values.high.shape))


def _level(share: Tensor, turn: Tensor, count: int, keeps_small: bool) -> Tensor:
    """Take the level below a share of the scale, or the one above it where its turn is less than the share's place
    between the two."""
    share = share.clamp(min=0.0)
    table = torch.tensor(
        [0.0, *(10 ** (_DECADES * (place / (count - 1) - 1)) for place in range(count))], dtype=torch.float64
    )
    below = (torch.searchsorted(table, share, right=True) - 1).clamp(0, count - 1)
    place = (share - table[below]) / (table[below + 1] - table[below])
    chosen = below + (turn < place)
    if keeps_small:
        chosen = torch.where(share > 0, chosen.clamp(min=1), 0)
    return table[chosen]
