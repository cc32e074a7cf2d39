"""AdamW's kernel against a plain loop in float64: on a GPU for real, elsewhere in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from truestep.step.update.optimizers import adamw, eight_bits
from truestep.step.update.optimizers.adamw import AdamWOptions, in_one_pass, in_passes, wrong_on
from truestep.step.update.optimizers.by_weight import Slot
from truestep.step.update.optimizers.eight_bits import Matrix, empty_state
from truestep.weights.blocks import ScaleBlocks

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
OPTIONS = AdamWOptions((0.9, 0.99), 1e-8, 0.1)
RATE, SCALE = 1e-2, 0.37


@pytest.fixture(autouse=True)
def kernel_on(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(adamw, "kernel_serves", lambda *_: True)


def make_slots(shapes: list[tuple[int, ...]], rounded: torch.dtype | None, first: int = 0) -> list[Slot]:
    """`first`: where each weight's numbers begin in memory that is aligned."""
    generator = torch.Generator().manual_seed(len(shapes) + first)

    def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        numbers = torch.randn(math.prod(shape) + first, generator=generator).to(DEVICE, dtype)
        return numbers[first:].view(shape)

    slots = []
    for number, shape in enumerate(shapes):
        state = {"exp_avg": made(shape) * 1e-3, "exp_avg_sq": made(shape).square() * 1e-6}
        lower = None if rounded is None else made(shape, rounded)
        slots.append(Slot(str(number), 0, number + 1, made(shape), made(shape), state, lower))
    return slots


def expected(slot: Slot) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight and moments after an update, number after number."""
    beta1, beta2 = OPTIONS.betas
    found = []
    numbers = (slot.weight, slot.gradient, slot.state["exp_avg"], slot.state["exp_avg_sq"])
    for w, g, m, v in zip(*(tensor.double().flatten().tolist() for tensor in numbers), strict=True):
        g *= SCALE
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w -= RATE * OPTIONS.weight_decay * w
        w -= RATE * (m / (1 - beta1**slot.number)) / (math.sqrt(v / (1 - beta2**slot.number)) + OPTIONS.epsilon)
        found.append((w, m, v))
    return tuple(torch.tensor(values, dtype=torch.float64) for values in zip(*found, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("rounded", [None, torch.float16])
def test_an_update_is_that_of_a_plain_loop(rounded: torch.dtype | None, first: int) -> None:
    """Of weights of many sizes and numbers of updates in one call, aligned in memory or not."""
    slots = make_slots([(3, 5), (1,), (2, 4096), (), (7, 1171), (64, 128)], rounded, first)
    wanted = [expected(slot) for slot in slots]
    in_one_pass(slots, OPTIONS)(RATE, SCALE)
    for slot, (weight, first_moment, second_moment) in zip(slots, wanted, strict=True):
        for found, right in (
            (slot.weight, weight),
            (slot.state["exp_avg"], first_moment),
            (slot.state["exp_avg_sq"], second_moment),
        ):
            torch.testing.assert_close(found.double().cpu().flatten(), right, rtol=1e-5, atol=1e-9)
        if slot.rounded is not None:
            assert torch.equal(slot.rounded, slot.weight.to(slot.rounded.dtype))


def test_what_lies_otherwise_in_memory_is_updated_as_well() -> None:
    """A weight whose numbers do not lie in their order has torch's kernel, beside others that have ours."""
    slots = make_slots([(8, 6), (5, 7), (0, 3)], torch.float16)
    turned = Slot(
        "turned", 0, 2, slots[0].weight.t(), slots[0].gradient.t(),
        {kind: value.t() for kind, value in slots[0].state.items()}, slots[0].rounded.t(),  # type: ignore[union-attr]
    )  # fmt: skip
    every = [turned, slots[1], slots[2]]
    wanted = [expected(slot) for slot in every[:2]]
    adamw.AdamW(OPTIONS, kernel=True).prepare(every)(RATE, SCALE)
    for slot, (weight, *_) in zip(every, wanted, strict=False):
        torch.testing.assert_close(slot.weight.double().cpu().flatten(), weight, rtol=1e-5, atol=1e-9)
        assert slot.rounded is not None and torch.equal(slot.rounded, slot.weight.half())


def test_torchs_passes_clip_and_round_too() -> None:
    slots = make_slots([(3, 5), (4096,)], torch.bfloat16)
    wanted = [expected(slot) for slot in slots]
    in_passes(slots, OPTIONS)(RATE, SCALE)
    for slot, (weight, *_) in zip(slots, wanted, strict=True):
        torch.testing.assert_close(slot.weight.double().cpu().flatten(), weight, rtol=1e-5, atol=1e-9)
        assert slot.rounded is not None and torch.equal(slot.rounded, slot.weight.bfloat16())


@pytest.mark.parametrize("fault", [None, "scale", "beta2", "rate", "decay"])
def test_the_check_on_a_machine_sees_a_fault(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.step.update.optimizers import adamw_kernel

    honest = adamw_kernel.Table.update

    def planted(self: adamw_kernel.Table, numbers: adamw_kernel.Numbers) -> None:
        honest(self, numbers if fault is None else numbers._replace(**{fault: getattr(numbers, fault) * 0.99}))

    monkeypatch.setattr(adamw_kernel.Table, "update", planted)
    found = wrong_on(DEVICE, torch.float16 if DEVICE.type == "cpu" else torch.bfloat16)
    assert (found is None) == (fault is None), found


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_tiny_decay_is_right_on_average(kind: str) -> None:
    """Far below a weight's rounding; 1 - decay as one float32 number would be off by half."""
    weight = torch.rand(2**16, generator=torch.Generator().manual_seed(0)).to(DEVICE).view(16, -1) + 0.5
    before, options = weight.double().sum(), AdamWOptions((0.9, 0.99), 1e-8, 0.01)
    decay = 2.5e-5 * options.weight_decay
    zeros = torch.zeros_like(weight)
    if kind == "adamw":
        slot = Slot("one", 0, 1, weight, zeros, {"exp_avg": zeros.clone(), "exp_avg_sq": zeros.clone()})
        in_one_pass([slot], options)(2.5e-5, 1.0)
    else:
        blocks, place = ScaleBlocks.of(weight.shape[1]), torch.arange(weight.shape[1], device=DEVICE)
        matrix = Matrix(weight, zeros, empty_state(weight, blocks), blocks, place[:16], place, 1)
        eight_bits.in_one_pass(matrix, options, 2.5e-5)
    found = float((before - weight.double().sum()) / before)
    assert found == pytest.approx(decay, rel=0.02)
