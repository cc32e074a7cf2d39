"""Muon (Jordan et al., 2024): updates each matrix by its approximately orthogonalised momentum."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from truestep.step.update.optimizers.by_weight import Slot, State, Update, round_weights, scale_gradients
from truestep.step.update.optimizers.exchange import WholeMatrices
from truestep.weights.protocol import Weights

# Jordan's polynomial a x + b x³ + c x⁵, which moves singular values in (0, 1] towards 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


@dataclass(frozen=True)
class MuonOptions:
    momentum: float
    nesterov: bool
    steps: int  # Newton-Schulz iterations
    adjust: str  # how the update's size depends on the matrix's shape: original or match_rms_adamw
    weight_decay: float
    dtype: torch.dtype = torch.float32  # dtype of the products in the iteration


def orthogonalise(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Bring the singular values of a matrix, or of each matrix of a stack, near 1 by the Newton-Schulz iteration."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    result = matrix.mT if tall else matrix
    norm = torch.linalg.vector_norm(result, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    result = (result / norm).to(dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        squared = result @ result.mT
        result = a * result + (b * squared + c * (squared @ squared)) @ result
    return (result.mT if tall else result).to(matrix.dtype)


def size_factor(shape: torch.Size, adjust: str) -> float:
    """Return the factor on the learning rate for a matrix of this shape."""
    rows, columns = shape[-2:]
    if adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon:
    """The update rule of Muon. Each matrix is gathered and orthogonalised on one of the ranks that have parts of it."""

    def __init__(self, weights: Weights, options: MuonOptions):
        self._weights, self._options = weights, options
        self._whole = WholeMatrices(weights)
        self.together = self._whole.workers

    def begin(self, name: str, part: torch.Tensor) -> State:
        return {"momentum_buffer": torch.zeros_like(part)}

    def prepare(self, slots: Sequence[Slot]) -> Update:
        return partial(self._update, slots)

    def _update(self, slots: Sequence[Slot], rate: float, scale: float) -> None:
        options = self._options
        by_name = {slot.name: slot for slot in slots}
        scale_gradients(slots, scale)
        for slot in slots:
            slot.state["momentum_buffer"].lerp_(slot.gradient, 1 - options.momentum)

        def direction(name: str) -> torch.Tensor:
            slot = by_name[name]
            average = slot.state["momentum_buffer"]
            return slot.gradient.lerp(average, options.momentum) if options.nesterov else average

        def work(matrix: torch.Tensor) -> torch.Tensor:
            return orthogonalise(matrix, options.steps, options.dtype)

        for slot, update in zip(slots, self._whole.each(list(by_name), direction, work), strict=True):
            factor = size_factor(self._weights.pieces[slot.name].shape, options.adjust)
            slot.weight.mul_(1 - rate * options.weight_decay)
            slot.weight.add_(update, alpha=-rate * factor)
        round_weights(slots)
