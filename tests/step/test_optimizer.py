"""AdamW against a plain float64 loop, which weights decay, the learning rate by hand, and going on bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from checkpoints import Held, optimizer_tensors
from truestep.step.update.optimizer import LearningRate, make_adamw, restore_optimizer, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.weights.protocol import Weights
from truestep.weights.whole import WholeWeights


class Small(torch.nn.Module):
    """An embedding, a matrix with a bias, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.LayerNorm(4)


VECTORS = {"linear.bias", "norm.weight", "norm.bias"}
OPTIONS = {"betas": (0.9, 0.95), "epsilon": 1e-6, "weight_decay": 0.1}


def make_weights(dtype: torch.dtype, seed: int = 0) -> Weights:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Small()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        return WholeWeights(model.double() if dtype == torch.float64 else model, dtype)


def set_gradients(weights: Weights, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    for gradient in weights.gradients.values():
        gradient.copy_(torch.randn(gradient.shape, generator=generator, dtype=torch.float64) * 10 ** (step % 4 - 2))
    return {name: gradient.double().clone() for name, gradient in weights.gradients.items()}


def adamw_by_loops(
    start: dict[str, torch.Tensor], gradients: list[dict[str, torch.Tensor]], rates: list[float]
) -> dict[str, torch.Tensor]:
    """Loshchilov and Hutter's, one number at a time, in Python's float64."""
    (beta1, beta2), epsilon, decay = OPTIONS["betas"], OPTIONS["epsilon"], OPTIONS["weight_decay"]
    result = {}
    for name, tensor in start.items():
        numbers = []
        for place, weight in enumerate(tensor.flatten().tolist()):
            first = second = 0.0
            for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
                slope = gradient[name].flatten()[place].item()
                first = beta1 * first + (1 - beta1) * slope
                second = beta2 * second + (1 - beta2) * slope**2
                if name not in VECTORS:
                    weight -= rate * decay * weight
                scale = math.sqrt(second / (1 - beta2**step)) + epsilon
                weight -= rate * first / (1 - beta1**step) / scale
            numbers.append(weight)
        result[name] = torch.tensor(numbers, dtype=torch.float64).reshape(tensor.shape)
    return result


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_adamw_equals_a_plain_loop(dtype: torch.dtype, tolerance: float) -> None:
    weights = make_weights(dtype)
    start = {name: master.detach().double().clone() for name, master in weights.master.items()}
    optimizer = make_adamw(weights, AdamWOptions(**OPTIONS))
    rates, gradients = [1e-3, 5e-3, 0.0, 2e-2, 1e-2, 1e-3], []
    for step, rate in enumerate(rates):
        gradients.append(set_gradients(weights, step))
        update(optimizer, weights, rate)
    for name, wanted in adamw_by_loops(start, gradients, rates).items():
        assert (weights.master[name].detach().double() - wanted).abs().max() < tolerance, name


def test_norms_and_biases_are_never_decayed() -> None:
    weights = make_weights(torch.float32)
    before = {name: master.detach().clone() for name, master in weights.master.items()}
    weights.zero_gradients()
    update(make_adamw(weights, AdamWOptions(**OPTIONS)), weights, 0.5)
    for name, master in weights.master.items():
        wanted = before[name] if name in VECTORS else before[name] * (1 - 0.5 * OPTIONS["weight_decay"])
        torch.testing.assert_close(master.detach(), wanted, rtol=1e-6, atol=0)
        assert torch.equal(master.detach(), before[name]) == (name in VECTORS)


def test_frozen_weights_are_left_alone_and_only_vectors_may_train() -> None:
    model = Small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in VECTORS)
    frozen = model.embedding.weight.detach().clone()
    weights = WholeWeights(model, torch.float32)
    assert set(weights.master) == VECTORS
    set_gradients(weights, 0)
    update(make_adamw(weights, AdamWOptions(**OPTIONS)), weights, 0.1)
    assert torch.equal(model.embedding.weight, frozen)


def test_updates_far_below_bfloat16s_rounding_add_up() -> None:
    """100 steps of 1e-5 at a weight of 1, where bfloat16's next number below is 4e-3 away."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    weights = WholeWeights(model, torch.bfloat16)
    optimizer = make_adamw(weights, AdamWOptions((0.9, 0.95), 1e-8, 0.0))
    for _ in range(100):
        weights.gradients["weight"].fill_(1.0)
        update(optimizer, weights, 1e-5)
    assert weights.master["weight"].dtype == torch.float32
    torch.testing.assert_close(weights.master["weight"].detach(), torch.full((2, 2), 1 - 1e-3), rtol=0, atol=5e-6)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, torch.ones(2, 2, dtype=torch.bfloat16)), "1 - 1e-3 rounds to 1"
    for _ in range(300):
        weights.gradients["weight"].fill_(1.0)
        update(optimizer, weights, 1e-5)
    assert torch.equal(model.weight, weights.master["weight"].to(torch.bfloat16))
    assert (model.weight < 1).all(), "and 1 - 4e-3 does not"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype: torch.dtype, before: int) -> None:
    def train(weights: Weights, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            set_gradients(weights, step)
            update(optimizer, weights, 1e-2 / (step + 1))

    uninterrupted = make_weights(dtype)
    optimizer = make_adamw(uninterrupted, AdamWOptions(**OPTIONS))
    train(uninterrupted, optimizer, range(before))
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, uninterrupted).items()}
    masters = {name: master.detach().clone() for name, master in uninterrupted.master.items()}
    train(uninterrupted, optimizer, range(before, before + 4))

    resumed = make_weights(dtype, seed=9)
    with torch.no_grad():
        for name, master in resumed.master.items():
            master.copy_(masters[name])
    other = make_adamw(resumed, AdamWOptions(**OPTIONS))
    restore_optimizer(other, resumed, Held(saved))
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    train(resumed, other, range(before, before + 4))
    for name, master in uninterrupted.master.items():
        assert torch.equal(resumed.master[name], master), name
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept.items()), (
        "the checkpoint's tensors are its own"
    )
    assert len(saved) == (0 if before == 0 else 3 * len(masters))


# (schedule, warm-up, minimum, step) -> rate, of a peak of 8 over 10 steps.
RATES = [
    ("constant", 0, 0.0, 1, 8.0), ("constant", 0, 0.0, 10, 8.0), ("constant", 4, 0.0, 1, 2.0),
    ("constant", 4, 0.0, 3, 6.0), ("constant", 4, 0.0, 4, 8.0), ("constant", 4, 0.0, 5, 8.0),
    ("linear", 4, 2.0, 1, 2.0), ("linear", 4, 2.0, 5, 8.0), ("linear", 4, 2.0, 8, 5.0), ("linear", 4, 2.0, 10, 3.0),
    ("linear", 4, 2.0, 11, 2.0), ("linear", 0, 0.0, 1, 8.0), ("linear", 0, 0.0, 6, 4.0), ("linear", 0, 0.0, 10, 0.8),
    ("cosine", 4, 2.0, 1, 2.0), ("cosine", 4, 2.0, 5, 8.0), ("cosine", 4, 2.0, 8, 5.0), ("cosine", 4, 2.0, 11, 2.0),
    ("cosine", 4, 2.0, 6, 2 + 6 * (1 + math.cos(math.pi / 6)) / 2), ("cosine", 4, 2.0, 99, 2.0),
    ("cosine", 4, 2.0, 9, 2 + 6 * 0.25), ("cosine", 10, 2.0, 10, 8.0), ("linear", 10, 2.0, 5, 4.0),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "warmup", "minimum", "step", "rate"), RATES)
def test_learning_rates_by_hand(schedule: str, warmup: int, minimum: float, step: int, rate: float) -> None:
    learning_rate = LearningRate(peak=8.0, schedule=schedule, warmup_steps=warmup, minimum=minimum, steps=10)
    assert learning_rate.at(step) == pytest.approx(rate, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_without_an_end_keeps_its_peak(schedule: str) -> None:
    learning_rate = LearningRate(peak=8.0, schedule=schedule, warmup_steps=2, minimum=1.0, steps=None)
    assert [learning_rate.at(step) for step in (1, 2, 3, 10**6)] == [4.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_rises_to_the_end_of_warm_up_and_never_again(schedule: str) -> None:
    rates = [LearningRate(1.0, schedule, 5, 0.1, 30).at(step) for step in range(1, 31)]
    assert rates[:5] == sorted(rates[:5])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert max(rates) == rates[4] == rates[5] == 1.0
    assert rates[-1] > 0.1, "no update is for nothing"
    assert LearningRate(1.0, schedule, 5, 0.1, 30).at(31) == pytest.approx(0.1)
