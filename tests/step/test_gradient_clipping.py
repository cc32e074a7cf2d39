"""The gradient norm against a plain float64 loop, at any size and scale, and what it costs: one look from the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from truestep.step.update.gradient_clipping import clip_scale, gradient_norm
from truestep.step.update.optimizer import make_adamw, make_adamw_8bit, make_custom_optimizer, make_muon, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.step.update.optimizers.muon import MuonOptions
from truestep.weights.protocol import Weights
from truestep.weights.whole import WholeWeights

ADAMW = AdamWOptions((0.9, 0.99), 1e-1, 0.0)  # by such an epsilon the size of a gradient matters
OPTIMIZERS: dict[str, Callable[[Weights], torch.optim.Optimizer]] = {
    "adamw": lambda weights: make_adamw(weights, ADAMW),
    "adamw_8bit": lambda weights: make_adamw_8bit(weights, ADAMW),
    "muon": lambda weights: make_muon(weights, MuonOptions(0.95, True, 5, "original", 0.0), ADAMW),
    "custom": lambda weights: make_custom_optimizer(
        lambda groups: torch.optim.SGD([weight for group in groups.values() for weight in group.values()], lr=0.0),
        weights,
    ),
}


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
    assert clip_scale(3.0, 6.0) == clip_scale(3.0, 3.0) == clip_scale(3.0, None) == clip_scale(math.nan, 1.0) == 1.0
    assert clip_scale(4.0, 0.5) == 0.125
    assert clip_scale(0.5, 0.125) == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon", "custom"])
def test_every_optimizer_updates_by_the_scaled_gradient(kind: str, dtype: torch.dtype) -> None:
    """As by a gradient that was multiplied before; and the model computes with the new weights."""
    found = []
    for before, scale in ((0.25, 1.0), (1.0, 0.25)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
        weights = WholeWeights(model, dtype)
        gradients = weights.gradients
        for gradient in gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1)) * before)
        update(OPTIMIZERS[kind](weights), weights, 1e-2, scale)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights.master[name].to(dtype)), name
        found.append({name: master.detach().clone() for name, master in weights.master.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
