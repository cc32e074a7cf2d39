"""Muon's parts against plain loops and by hand; over ranks: tests/ranks/test_optimizers.py."""

from __future__ import annotations

import math

import pytest
import torch

from truestep.step.update.optimizer import make_muon, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.step.update.optimizers.muon import MuonOptions, orthogonalise, size_factor
from truestep.weights.whole import WholeWeights

Matrix = list[list[float]]


def product(one: Matrix, other: Matrix) -> Matrix:
    columns = list(zip(*other, strict=True))
    return [[math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in one]


def orthogonalised_by_loops(matrix: Matrix, steps: int) -> Matrix:
    norm = math.sqrt(math.fsum(value * value for row in matrix for value in row))
    result = [[value / norm for value in row] for row in matrix]
    for _ in range(steps):
        squared = product(result, [list(column) for column in zip(*result, strict=True)])
        cubed = product(squared, result)
        fifth = product(squared, cubed)
        result = [
            [3.4445 * a - 4.7750 * b + 2.0315 * c for a, b, c in zip(*rows, strict=True)]
            for rows in zip(result, cubed, fifth, strict=True)
        ]
    return result


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (9, 2), (1, 5)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_a_matrix_becomes_what_plain_loops_make_it(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    wanted = torch.tensor(orthogonalised_by_loops(matrix.tolist(), 5), dtype=torch.float64)
    found = orthogonalise(matrix, 5, dtype)
    assert found.dtype == dtype
    assert (found.double() - wanted).abs().max() < tolerance


def test_its_singular_values_come_near_one() -> None:
    """Jordan's coefficients bring them between 0.68 and 1.13, and no nearer."""
    matrix = torch.randn(40, 60, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalise(matrix, 5, torch.float32))
    assert values.min() > 0.6 and values.max() < 1.25
    plain = torch.linalg.svdvals(matrix)
    assert plain.max() / plain.min() > 5
    half = torch.linalg.svdvals(orthogonalise(matrix, 5, torch.bfloat16))
    assert half.min() > 0.5 and half.max() < 1.35


def test_of_a_stack_each_matrix_is_made_by_itself() -> None:
    stack = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = orthogonalise(stack, 5, torch.float64)
    for matrix, alone in zip(found, stack, strict=True):
        torch.testing.assert_close(matrix, orthogonalise(alone, 5, torch.float64), rtol=0, atol=1e-14)


def test_a_matrix_of_zeros_stays_so() -> None:
    assert torch.equal(orthogonalise(torch.zeros(3, 4), 5, torch.float32), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("shape", "original", "matched"), [((4, 9), 1.0, 0.6), ((9, 4), 1.5, 0.6), ((7, 16, 4), 2.0, 0.8)], ids=str
)
def test_size_factors_by_hand(shape: tuple[int, ...], original: float, matched: float) -> None:
    assert size_factor(torch.Size(shape), "original") == pytest.approx(original, rel=1e-15)
    assert size_factor(torch.Size(shape), "match_rms_adamw") == pytest.approx(matched, rel=1e-15)


@pytest.mark.parametrize("nesterov", [True, False])
def test_three_updates_are_those_of_a_plain_loop(nesterov: bool) -> None:
    """The running mean of the gradients decides the direction; weights decay by the rate."""
    generator, momentum, decay, rate = torch.Generator().manual_seed(2), 0.9, 0.1, 0.02
    start, *gradients = (torch.randn(5, 3, generator=generator) for _ in range(4))
    weights = WholeWeights(torch.nn.ParameterDict({"matrix": start.clone()}), torch.float32)
    options = MuonOptions(momentum, nesterov, 5, "original", decay)
    optimizer = make_muon(weights, options, AdamWOptions((0.9, 0.999), 1e-8, 0.0))
    mean, wanted = torch.zeros(5, 3, dtype=torch.float64), start.double()
    for gradient in gradients:
        weights.gradients["matrix"].copy_(gradient)
        update(optimizer, weights, rate)
        mean = momentum * mean + (1 - momentum) * gradient.double()
        direction = momentum * mean + (1 - momentum) * gradient.double() if nesterov else mean
        turned = torch.tensor(orthogonalised_by_loops(direction.T.tolist(), 5), dtype=torch.float64).T
        wanted = wanted * (1 - rate * decay) - rate * math.sqrt(5 / 3) * turned
        assert (weights.master["matrix"].detach().double() - wanted).abs().max() < 1e-5
