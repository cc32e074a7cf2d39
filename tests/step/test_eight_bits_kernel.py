"""The kernel of AdamW in 8 bits against torch's operations and plain loops: on a GPU for real, elsewhere in Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from step.test_eight_bits import check_plain_loops, check_rows_at_a_time
from truestep.step.update.optimizers import eight_bits
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.step.update.optimizers.eight_bits import (
    FIRST,
    SECOND,
    Matrix,
    Quantised,
    dequantise,
    empty_state,
    in_one_pass,
    in_passes,
)
from truestep.weights.blocks import ScaleBlocks

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

LOWER = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # Triton's interpreter does not round to bfloat16


@pytest.fixture(autouse=True)
def kernel_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(eight_bits, "kernel_serves", lambda *_: True)
    return


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (3, 7), (4, 16), (5, 61), (2, 96), (3, 512), (2, 16 * 257), (2, 16 * 300), (1, 9728)]
)
def test_each_update_is_that_of_torchs_operations(rows: int, columns: int) -> None:
    """Of a part of a weight, whose rows and columns begin elsewhere. Both go on from the same codes each time."""
    generator = torch.Generator().manual_seed(rows + columns)
    blocks, places = ScaleBlocks.of(columns), (torch.arange(rows) + 70_000, torch.arange(columns) + 3 * columns)
    places = tuple(place.to(DEVICE) for place in places)
    weight = torch.randn(rows, columns, generator=generator).to(DEVICE)
    state = empty_state(weight, blocks)
    for number in (1, 2, 3, 1000):
        gradient = torch.randn(rows, columns, generator=generator)
        gradient *= 10.0 ** torch.randint(-9, 3, (rows, columns), generator=generator)
        gradient[torch.rand(rows, columns, generator=generator) < 0.1] = 0
        found = []
        for update_ in (in_passes, in_one_pass):
            kept = {kind: value.clone() for kind, value in state.items()}
            matrix = Matrix(weight.clone(), gradient.to(DEVICE), kept, blocks, *places, number)
            update_(matrix, AdamWOptions((0.9, 0.99), 1e-8, 0.1), 1e-2)
            found.append((matrix.weight, kept))
        (weight, state), (own, fused) = found
        assert torch.allclose(weight, own, rtol=1e-6, atol=1e-7)
        for kind, count in (("exp_avg", FIRST), ("exp_avg_root", SECOND)):
            largest = f"{kind}_largest"
            assert torch.allclose(state[largest], fused[largest], rtol=1e-4, atol=0)
            off = (state[kind].int() - fused[kind].int()).abs()
            assert int(off.max()) <= 1 and int((off > 0).sum()) <= 1 + off.numel() // 200, "a digit decides"
            values = dequantise(Quantised(fused[kind], fused[largest]), blocks, count)
            assert torch.equal(values == 0, fused[kind] == 0)


def test_its_updates_are_those_of_plain_loops() -> None:
    check_plain_loops(DEVICE)


def test_rows_at_a_time_are_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows_at_a_time(monkeypatch, DEVICE)


def test_the_self_test_finds_nothing_wrong() -> None:
    assert eight_bits.wrong_on(DEVICE, LOWER) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decay", 0.0),
        ("scale", 0.6),
        ("step_size", 9e-3),
        ("correction", 0.9),
        ("decades", 7.0),
        ("betas", (0.9, 0.95)),
        ("along", None),
    ],
)
def test_the_self_test_finds_a_fault(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.step.update.optimizers import eight_bits_kernel

    honest = eight_bits_kernel.update_
    names = ("weight", "gradient", "first", "root", "blocks", "levels", "along", "decades", "betas", "scale", "rounded")

    def planted(*arguments: Any, **named: Any) -> None:
        given = dict(zip(names, arguments, strict=True)) | named
        if name == "along":  # every row has the first one's turns
            row = given["along"][0][:1].expand(len(given["weight"])).contiguous()
            given[name] = (row, row, given["along"][2])
        else:
            given[name] = value
        honest(**given)

    monkeypatch.setattr(eight_bits_kernel, "update_", planted)
    assert eight_bits.wrong_on(DEVICE, LOWER) is not None


def test_a_kernel_that_does_not_run_or_is_wrong_is_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()

    def fails(device: torch.device, dtype: torch.dtype) -> str | None:
        raise RuntimeError("no compiler here")

    place = torch.device("cuda", 77)
    for planted, said in ((fails, "RuntimeError: no compiler here"), (lambda *_: "weight in rows of 7", "rows of 7")):
        eight_bits.kernel_serves.cache_clear()
        monkeypatch.setattr(eight_bits, "wrong_on", planted)
        assert not eight_bits.kernel_serves(place, LOWER)
        assert said in caplog.text and "adamw_8bit" in caplog.text
    eight_bits.kernel_serves.cache_clear()
    assert not eight_bits.kernel_serves(torch.device("cpu"), LOWER)
