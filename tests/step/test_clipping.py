"""The gradient norm against a plain float64 loop, at any size and scale, and what it costs: one look from the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from truestep.policy.weights.whole import WholeWeights
from truestep.step.clipping import clip_gradients, gradient_norm


def weights_of(*gradients: torch.Tensor) -> WholeWeights:
    named = {str(number): torch.zeros_like(gradient) for number, gradient in enumerate(gradients)}
    weights = WholeWeights(torch.nn.ParameterDict(named), torch.float32)
    for own, gradient in zip(weights.gradients.values(), gradients, strict=True):
        own.copy_(gradient)
    return weights


def norm_by_loop(*gradients: torch.Tensor) -> float:
    return math.sqrt(math.fsum(value**2 for gradient in gradients for value in gradient.flatten().tolist()))


class Watched(TorchDispatchMode):
    """Counts what the host waits for, and finds the largest float64 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.largest = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten._local_scalar_dense.default:
            self.waits += 1
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.largest = max(self.largest, tensor.numel())
        return result


SHAPES = [(3,), (64,), (65, 3), (2, 5, 130), (0, 7), (1,), (127, 129)]


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12, 1e-30, 1e15, 1e25, 1e38], ids=str)
def test_it_equals_a_plain_loop(scale: float) -> None:
    """Also where the squares are beyond float32, and where the numbers are of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    spread = [
        torch.randn(shape, generator=generator) ** 5 * 10 ** -(number % 4.0) for number, shape in enumerate(SHAPES)
    ]
    gradients = [gradient * (scale / max(float(g.abs().max()) for g in spread if g.numel())) for gradient in spread]
    assert gradient_norm(weights_of(*gradients)) == pytest.approx(norm_by_loop(*gradients), rel=1e-7)


def test_of_a_large_gradient_it_is_exact() -> None:
    """A float32 sum of 3e7 squares, one after another as a CPU adds, is off by more than a thousandth."""
    assert gradient_norm(weights_of(torch.full((30_000, 1_000), 0.37))) == pytest.approx(0.37 * 3e7**0.5, rel=1e-7)
    assert gradient_norm(weights_of(torch.full((4,), 1e30))) == pytest.approx(2e30, rel=1e-6)


def test_the_host_waits_once_and_no_pass_is_in_float64() -> None:
    weights = weights_of(*(torch.ones(100, 64) for _ in range(20)))
    with Watched() as watched:
        norm = gradient_norm(weights)
    assert norm == pytest.approx((20 * 6400) ** 0.5, rel=1e-12)
    assert watched.waits == 1
    assert watched.largest == 100, "a sum of each run of 64"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(value: float) -> None:
    gradient = torch.ones(7, 100)
    gradient[3, 5] = value
    assert not math.isfinite(gradient_norm(weights_of(torch.ones(3), gradient)))


def test_no_gradient_and_no_weight() -> None:
    assert gradient_norm(weights_of(torch.zeros(5, 70))) == 0.0


def test_clipping_scales_to_the_threshold() -> None:
    gradients = [torch.full((2, 3), 3.0), torch.full((5,), -4.0), torch.zeros(0, 2)]
    weights = weights_of(*gradients)
    norm = gradient_norm(weights)
    clip_gradients(weights.gradients, norm, 2 * norm)
    clip_gradients(weights.gradients, norm, None)
    assert torch.equal(weights.gradients["0"], gradients[0])
    clip_gradients(weights.gradients, norm, 0.5)
    assert gradient_norm(weights) == pytest.approx(0.5, rel=1e-6)
    assert float(weights.gradients["1"][0]) == pytest.approx(-2 / norm, rel=1e-6)
