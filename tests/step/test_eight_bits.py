"""Moments in 8 bits against plain loops, one number at a time, written from docs/optimizers.md."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

import pytest
import torch

from checkpoints import Held, optimizer_tensors
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks
from truestep.step.update.optimizer import make_adamw_8bit, restore_optimizer, update
from truestep.step.update.optimizers import by_weight, eight_bits
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.step.update.optimizers.eight_bits import (
    FIRST,
    SECOND,
    BlockError,
    Quantised,
    check_blocks,
    dequantise,
    levels,
    quantise,
    turns,
)
from truestep.tools.verify.oracle.updates import Interval, blocks_of, stored
from truestep.weights.blocks import ScaleBlocks
from truestep.weights.pieces import WeightSlice
from truestep.weights.whole import WholeWeights

OPTIONS = AdamWOptions((0.9, 0.95), 1e-6, 0.1)
FACTORS = {127: 2654435769, 255: 1640531527}


def blocks_by_hand(columns: int) -> list[list[int]]:
    parts = next(count for count in range(16, 0, -1) if columns % count == 0 and 16 % count == 0)
    length = columns // parts
    size = math.ceil(length / math.ceil(length / 256))
    found = []
    for part in range(parts):
        inside = list(range(part * length, (part + 1) * length))
        found += [inside[start : start + size] for start in range(0, length, size)]
    return found


def turn_by_hand(row: int, column: int, number: int, count: int) -> float:
    place = row * 3242174889 + column * 2447445414 + number * FACTORS[count]
    return ((place + 2**31) % 2**32 // 256) / 2**24


def level_by_hand(share: float, turn: float, count: int) -> float:
    table = [0.0] + [10 ** (5 * (place / (count - 1) - 1)) for place in range(count)]
    below = min(bisect_right(table, share) - 1, count - 1)
    above = turn < (share - table[below]) / (table[below + 1] - table[below])
    if count == 255 and share > 0 and not below:
        above = True
    return table[below + above]


def stored_by_loops(values: list[list[float]], number: int, count: int) -> list[list[float]]:
    """Write and read again a matrix."""
    found = [[0.0] * len(row) for row in values]
    for row, line in enumerate(values):
        for block in blocks_by_hand(len(line)):
            scale = max(abs(line[column]) for column in block)
            for column in block:
                share = abs(line[column]) / scale if scale else 0.0
                level = level_by_hand(share, turn_by_hand(row, column, number, count), count)
                found[row][column] = math.copysign(scale * level, line[column])
    return found


SHAPES = [(3, 48), (5, 7), (2, 16), (2, 512), (1, 8 * 300)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [FIRST, SECOND])
def test_what_is_read_again_is_what_plain_loops_make(shape: tuple[int, int], count: int) -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(shape, generator=generator) * 10 ** (-9 * torch.rand(shape, generator=generator))
    values[0, :3] = 0.0
    values = values if count == FIRST else values.abs()
    blocks, number = ScaleBlocks.of(shape[1]), 5
    turn = turns(torch.arange(shape[0]), torch.arange(shape[1]), number, count)
    written = quantise(values, blocks, turn, count)
    assert written.codes.dtype == (torch.int8 if count == FIRST else torch.uint8)
    assert written.scale.shape == (shape[0], len(blocks_by_hand(shape[1])))
    found = dequantise(written, blocks, count)
    wanted = torch.tensor(stored_by_loops(values.double().tolist(), number, count), dtype=torch.float64)
    apart = (found.double() - wanted).abs() > 1e-6 * wanted.abs()
    assert int(apart.sum()) <= 1, "only where float32 decides which of two levels it is"
    exact = values.double()
    oracle = stored(Interval(exact, exact), turn.double(), count, keeps_small=count == SECOND)
    assert int(((oracle.low - wanted).abs() > 1e-12 * wanted.abs()).sum()) == 0, "the oracle of verify says the same"
    assert blocks_of(shape[1]) == [range(block[0], block[-1] + 1) for block in blocks_by_hand(shape[1])]


@pytest.mark.parametrize("columns", [1, 7, 16, 61, 96, 768, 1024, 3072, 5120, 9728])
def test_blocks_fold_and_unfold_and_end_where_ranks_cut(columns: int) -> None:
    blocks = ScaleBlocks.of(columns)
    values = torch.arange(2.0 * columns).view(2, columns)
    folded = blocks.fold(values)
    assert folded.shape[1] == blocks.of_row(columns) and folded.shape[2] <= 256
    assert torch.equal(blocks.unfold(folded), values)
    for ranks in (2, 4, 8, 16):
        if columns % 16 == 0:
            part = values[:, columns // ranks : 2 * columns // ranks]
            own = blocks.of_row(columns // ranks)
            assert torch.equal(blocks.fold(part), folded[:, own : 2 * own])


def test_the_largest_of_a_block_is_exact_and_levels_are_close() -> None:
    values = torch.tensor([[3.5, -0.1, 0.0, 1e-3] * 4])
    turn = torch.full((1, 16), 0.999)
    found = dequantise(quantise(values, ScaleBlocks.of(16), turn, FIRST), ScaleBlocks.of(16), FIRST)
    assert torch.equal(found, values), "each block has one number"
    table = levels(SECOND, torch.device("cpu"))
    assert len(table) == 256 and table[-1] == 1 and float((table[2:] / table[1:-1]).max()) < 1.0656
    assert len(levels(FIRST, torch.device("cpu"))) == 128


def test_numbers_are_right_on_average() -> None:
    """Over many updates a number between two levels is read again as itself, to a thousandth of itself."""
    values = torch.rand(4, 64, generator=torch.Generator().manual_seed(1)) + 0.01
    rows, columns = torch.arange(4), torch.arange(64)
    for count in (FIRST, SECOND):
        total = torch.zeros(4, 64, dtype=torch.float64)
        for number in range(400):
            written = quantise(values, ScaleBlocks.of(64), turns(rows, columns, number, count), count)
            total += dequantise(written, ScaleBlocks.of(64), count).double()
        assert float((total / 400 / values - 1).abs().max()) < 1e-3


def test_a_second_moment_follows_slow_changes() -> None:
    """A gradient that falls to a third: with beta2 0.999 each update moves the root by a fiftieth of a level."""
    weights = WholeWeights(torch.nn.ParameterDict({"w": torch.zeros(16, 64)}), torch.float32)
    optimizer = make_adamw_8bit(weights, AdamWOptions((0.9, 0.999), 1e-8, 0.0))
    sizes = torch.rand(16, 64, generator=torch.Generator().manual_seed(4)) + 0.1
    plain = torch.zeros(16, 64)
    for number in range(1500):
        gradient = sizes * (1.0 if number < 500 else 1 / 3)
        weights.gradients["w"].copy_(gradient)
        update(optimizer, weights, 0.0)
        plain = 0.999 * plain + 0.001 * gradient**2
    state = optimizer.state[weights.master["w"]]
    blocks = ScaleBlocks.of(64)
    root = dequantise(Quantised(state["exp_avg_root"], state["exp_avg_root_largest"]), blocks, SECOND)
    assert float((root / plain.sqrt() - 1).abs().mean()) < 0.05
    assert abs(float((root / plain.sqrt()).mean()) - 1) < 0.01


def test_what_is_not_zero_never_divides_by_zero() -> None:
    values = torch.tensor([[1.0, 1e-30] + [0.0] * 14]).repeat(1, 16)
    blocks = ScaleBlocks.of(256)
    written = quantise(values, blocks, torch.full((1, 256), 0.999), SECOND)
    found = dequantise(written, blocks, SECOND)
    assert float(found[0, 1]) > 0 and float(found[0, 2]) == 0


def adamw_by_loops(start: torch.Tensor, gradients: list[torch.Tensor], rates: list[float]) -> torch.Tensor:
    (beta1, beta2), epsilon, decay = OPTIONS.betas, OPTIONS.epsilon, OPTIONS.weight_decay
    weight = start.double().tolist()
    rows, columns = range(start.shape[0]), range(start.shape[1])
    first = [[0.0] * len(columns) for _ in rows]
    root = [[0.0] * len(columns) for _ in rows]
    for number, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        slopes = gradient.double().tolist()
        for row in rows:
            for column in columns:
                slope = slopes[row][column]
                first[row][column] = beta1 * first[row][column] + (1 - beta1) * slope
                root[row][column] = math.sqrt(beta2 * root[row][column] ** 2 + (1 - beta2) * slope**2)
                scale = root[row][column] / math.sqrt(1 - beta2**number) + epsilon
                weight[row][column] *= 1 - rate * decay
                weight[row][column] -= rate * first[row][column] / (1 - beta1**number) / scale
        first, root = stored_by_loops(first, number, 127), stored_by_loops(root, number, 255)
    return torch.tensor(weight, dtype=torch.float64)


def made_weights(device: str | torch.device = "cpu") -> WholeWeights:
    generator = torch.Generator().manual_seed(5)
    named = {"matrix": torch.randn(6, 32, generator=generator), "vector": torch.randn(5, generator=generator)}
    return WholeWeights(
        torch.nn.ParameterDict({name: value.to(device) for name, value in named.items()}), torch.float32
    )


def set_gradients(weights: WholeWeights, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for gradient in weights.gradients.values():
        gradient.copy_(torch.randn(gradient.shape, generator=generator) * 10.0 ** (step % 3 - 1))


def check_plain_loops(device: str | torch.device) -> None:
    weights = made_weights(device)
    start = weights.master["matrix"].detach().clone()
    optimizer, rates, gradients = make_adamw_8bit(weights, OPTIONS), [1e-3, 5e-3, 2e-2, 1e-2, 1e-3, 3e-3], []
    for step, rate in enumerate(rates):
        set_gradients(weights, step)
        gradients.append(weights.gradients["matrix"].clone())
        update(optimizer, weights, rate)
    wanted = adamw_by_loops(start, gradients, rates)
    assert float((weights.master["matrix"].detach().cpu().double() - wanted).abs().max()) < 1e-6


def check_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, device: str | torch.device) -> None:
    found = []
    for numbers in (2**24, 70, 1):
        monkeypatch.setattr(by_weight, "_NUMBERS", numbers)
        weights = made_weights(device)
        optimizer = make_adamw_8bit(weights, OPTIONS)
        for step in range(3):
            set_gradients(weights, step)
            update(optimizer, weights, 1e-2)
        found.append(weights.master["matrix"].detach().clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_its_updates_are_those_of_plain_loops() -> None:
    check_plain_loops("cpu")


def test_rows_at_a_time_are_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows_at_a_time(monkeypatch, "cpu")


def test_state_is_kept_in_eight_bits_and_goes_on_bit_for_bit() -> None:
    def go_on(weights: WholeWeights, optimizer: Any, steps: range) -> None:
        for step in steps:
            set_gradients(weights, step)
            update(optimizer, weights, 1e-2)

    weights = made_weights()
    optimizer = make_adamw_8bit(weights, OPTIONS)
    go_on(weights, optimizer, range(3))
    kept = {name: value.clone() for name, value in optimizer_tensors(optimizer, weights).items()}
    sizes = {name: value.nbytes for name, value in kept.items() if name.startswith("matrix")}
    assert sizes == {
        "matrix.exp_avg": 192, "matrix.exp_avg_largest": 6 * 16 * 4, "matrix.exp_avg_root": 192,
        "matrix.exp_avg_root_largest": 6 * 16 * 4, "matrix.step": 4,
    }  # fmt: skip
    assert kept["vector.exp_avg"].dtype == torch.float32
    resumed = made_weights()
    with torch.no_grad():
        for name, master in resumed.master.items():
            master.copy_(weights.master[name])
    other = make_adamw_8bit(resumed, OPTIONS)
    restore_optimizer(other, resumed, Held(kept))
    go_on(weights, optimizer, range(3, 6))
    go_on(resumed, other, range(3, 6))
    assert all(torch.equal(resumed.master[name], weights.master[name]) for name in weights.master)


def test_ranks_that_cut_within_blocks_are_refused_by_name() -> None:
    weights = made_weights()
    weights.pieces["matrix"] = WeightSlice(torch.Size([6, 24]), cut={"tensor": 1})
    for ranks, fits in ((2, True), (4, True), (8, True), (3, False), (16, False)):
        weights.ranks = Ranks(0, RankLayout(data_shard=1, tensor=ranks))
        if fits:
            check_blocks(weights, ["matrix"])
        else:
            with pytest.raises(BlockError, match=f"parallel.tensor: {ranks} cuts the 24 columns of matrix within blo"):
                check_blocks(weights, ["matrix"])
    weights.pieces["matrix"] = WeightSlice(torch.Size([6, 24]), cut={"tensor": 0})
    check_blocks(weights, ["matrix"])


def test_turns_differ_between_neighbours_and_moments() -> None:
    rows, columns = torch.arange(50), torch.arange(50)
    found = turns(rows, columns, 3, FIRST)
    assert float(found.min()) >= 0 and float(found.max()) < 1
    assert abs(float(found.mean()) - 0.5) < 0.02
    assert len(set(found.flatten().tolist())) == 2500
    assert not torch.equal(found, turns(rows, columns, 3, SECOND))
    assert torch.equal(turns(rows + 10, columns, 3, FIRST)[:40], turns(rows, columns, 3, FIRST)[10:])
    far = turns(torch.tensor([2**30]), torch.tensor([2**17]), 10**6, SECOND)
    assert float(far) == turn_by_hand(2**30, 2**17, 10**6, 255)
    assert eight_bits.STEPS == FACTORS
