"""Weights cut over tensor ranks and stages: slices that join to what was cut, and gradients that add up."""

from typing import Any

import pytest
import torch

from checkpoints import Held, optimizer_tensors
from ranks.cases import on_ranks
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks, join, leave
from truestep.step.update.gradient_clipping import gradient_norm
from truestep.step.update.optimizer import make_adamw, restore_optimizer, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.weights.pieces import WeightSlice, pieces_of, sum_parts
from truestep.weights.whole import WholeWeights

SHAPES = {"embedding": (7, 3), "columns": (2, 8), "norm": (5,), "late": (4,)}


@pytest.mark.parametrize("rows", [1, 3, 4, 97])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slices_are_all_of_it(rows: int, ranks: int) -> None:
    whole = torch.arange(rows * 2).view(rows, 2)
    piece = WeightSlice(whole.shape, cut={"tensor": 0})
    slices = [piece.slice(whole, Ranks(rank, RankLayout(data_shard=1, tensor=ranks))) for rank in range(ranks)]
    assert torch.equal(torch.cat(slices), whole)


def test_the_pieces_of_a_model_that_is_not_cut() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[1].weight.requires_grad_(False)
    pieces = pieces_of(model)
    assert list(pieces) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert pieces["1.weight"] == WeightSlice(torch.Size([1, 3]), trained=False)
    assert all(piece.counted_on(Ranks()) for piece in pieces.values())


def test_pieces_over_two_slices_and_two_stages() -> None:
    on_ranks(4, _check_pieces)


def _whole(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        name: scale * torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for name, shape in SHAPES.items()
    }


def _check_pieces() -> None:
    ranks = join(RankLayout(tensor=2, pipeline=2), device="cpu", stall_timeout=30)
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    pieces = {
        "embedding": WeightSlice(shapes["embedding"], cut={"tensor": 0}, stages=(0, 1)),
        "columns": WeightSlice(shapes["columns"], cut={"tensor": 1}, stages=(0,)),
        "norm": WeightSlice(shapes["norm"], stages=(0,)),
        "late": WeightSlice(shapes["late"], stages=(1,)),
    }
    whole = _whole()
    model = torch.nn.ParameterDict(
        {name: pieces[name].slice(whole[name], ranks).clone() for name in pieces if ranks.stage in pieces[name].stages}
    )
    weights = WholeWeights(model, torch.float32, ranks, pieces)
    kept = {name: value.clone() for name, value in weights.collect().items()}
    for name, gradient in weights.gradients.items():
        # What other ranks have a part of is split between them; the rest is here, whole.
        parts = len(pieces[name].stages) * (1 if pieces[name].cut else 2)
        gradient.copy_(pieces[name].slice(whole[name], ranks) / parts)
    sum_parts(ranks, pieces, weights.gradients)
    gradients = weights.collect_gradients()
    squares = sum(float(value.square().sum()) for value in whole.values())
    assert gradient_norm(weights) == pytest.approx(squares**0.5, rel=1e-12)
    optimizer = make_adamw(weights, AdamWOptions((0.9, 0.999), 1e-8, 0.0))
    assert optimizer_tensors(optimizer, weights) == {}
    update(optimizer, weights, 0.5)
    moments = optimizer_tensors(optimizer, weights)
    if ranks.first:
        assert list(kept) == list(gradients) == list(SHAPES)
        for name, value in whole.items():
            assert torch.equal(kept[name], value)
            torch.testing.assert_close(gradients[name], value)
            torch.testing.assert_close(moments[f"{name}.exp_avg"], 0.1 * value)
            assert moments[f"{name}.step"] == 1
    else:
        assert not kept and not gradients and not moments
    given = {f"{name}.exp_avg": value for name, value in _whole(3.0).items()}
    given |= {f"{name}.exp_avg_sq": value for name, value in _whole(5.0).items()}
    restore_optimizer(optimizer, weights, Held(given | {f"{name}.step": torch.tensor(7.0) for name in SHAPES}))
    for name, master in weights.master.items():
        state = optimizer.state[master]
        assert torch.equal(state["exp_avg"], pieces[name].slice(3 * whole[name], ranks))
        assert state["step"] == 7
    leave()
