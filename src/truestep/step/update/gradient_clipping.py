"""The norm of a step's gradient, and clipping by it."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from truestep.ranks.axes import WEIGHT_PARTS
from truestep.weights.digests import Squares
from truestep.weights.finite import LARGEST
from truestep.weights.protocol import Weights

# Squares of this many numbers are summed in float32, and these sums in float64. A CPU's float32 sum of all squares
# would be wrong by percents. Converting all numbers to float64 would need twice the tensor's memory.
_RUN = 64
# For norms between these, float32 squares do not underflow or overflow enough to matter.
_SMALLEST = 1e-9
_LARGEST = 1e18
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_SLICE = 2**22  # numbers that are copied to float64 at a time


@torch.no_grad()
def gradient_norm(
    weights: Weights, meanwhile: Callable[[], None] = lambda: None, squares: Squares | None = None
) -> float:
    """Compute the norm over the gradients of all weights, each counted once, after `gradient_divisor`, before clipping.
    There is one host-device sync; `meanwhile` is called just before it. If squares may leave the range of float32, the
    norm is computed again in float64. All ranks do so together, since they have the same norm. `squares` is filled with
    the squared norm of each gradient shard that this rank counts."""
    ranks = weights.ranks
    counted = {
        name: gradient.reshape(-1)
        for name, gradient in weights.gradients.items()
        if weights.pieces[name].counted_on(ranks)
    }
    norm = _norm(weights, counted, _squares, meanwhile, squares)
    return norm if _SMALLEST < norm < _LARGEST else _norm(weights, counted, _exact_squares, kept=squares)


def _norm(
    weights: Weights,
    gradients: Mapping[str, torch.Tensor],
    squares: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    meanwhile: Callable[[], None] = lambda: None,
    kept: Squares | None = None,
) -> float:
    sums = squares(list(gradients.values())) if gradients else None  # [gradients, parts of each]
    total = torch.zeros((), dtype=torch.float64, device=weights.device) if sums is None else sums.sum()
    if sums is not None and kept is not None:
        kept.keep(list(gradients), sums.sum(1))
    for group in WEIGHT_PARTS:
        weights.ranks.sum_over(group, total)
    meanwhile()
    return math.sqrt(float(total))


def _squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:  # [gradients, 1 or 2] float64
    """Sum the squares of flat gradients: `_RUN` squares in float32; these sums and the remainder in float64. On a GPU,
    one kernel for all gradients is accurate enough: each thread adds few numbers, and the threads' sums are added as a
    tree."""
    if gradients[0].device.type == "cuda":
        return torch.stack(torch._foreach_norm(list(gradients))).double().square()[:, None]
    sums = [part.double().square().sum() for gradient in gradients for part in _runs(gradient)]
    return torch.stack(sums).view(-1, 2)


def _runs(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = len(gradient) // _RUN * _RUN
    return torch.linalg.vector_norm(gradient[:whole].view(-1, _RUN), dim=1), gradient[whole:]


def _exact_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:  # [gradients, 1] float64
    parts = [torch.stack([part.double().square().sum() for part in one.split(_SLICE)]).sum() for one in gradients]
    return torch.stack(parts)[:, None]


def clip_scale(norm: float, threshold: float | None) -> float:
    """Return the factor that clips gradients of this norm; 1 if `threshold` is None."""
    return threshold / norm if threshold is not None and norm > threshold else 1.0


def usable(norm: float, threshold: float | None) -> bool:
    """Return whether an optimizer can use a gradient of this norm after clipping. The clipping factor, and the squares
    of the gradient's elements (for second moments), must be in the range of float32."""
    scale = clip_scale(norm, threshold)
    return norm * scale <= LARGEST and scale >= _SMALLEST_SCALE


def explain_useless(norm: float, threshold: float | None) -> str:
    """Return the reason why no optimizer can use a gradient of this norm."""
    if not math.isfinite(norm):
        return f"the gradient's norm is {norm}"
    clip = "null" if threshold is None else f"{threshold:g}"
    return (
        f"the gradient's norm is {norm:.3g}, too large with optimizer.gradient_clip: {clip}: second moments need its "
        f"square, and float32 has no numbers above the square of {LARGEST:g}"
    )
