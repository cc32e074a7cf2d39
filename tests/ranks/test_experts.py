"""Experts divided over ranks: values and gradients of each family's own block against plain float64 loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.test_experts import FAMILIES, block_of
from oracles import experts as oracle
from ranks.cases import on_ranks
from truestep.model.experts.grouped import group_experts
from truestep.model.experts.over_ranks import ExpertRanks
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join

TOLERANCE = 1e-5
EVEN = (5, 5, 5, 5)
UNEVEN = (7, 0, 2, 1)  # a rank without a token, and fewer tokens than experts
ODD: dict[str, int] = {"hidden_size": 31, "moe_intermediate_size": 13, "intermediate_size": 13}


def tokens_of(config: Any, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    every = torch.randn(sum(sizes), config.hidden_size, generator=torch.Generator().manual_seed(1))
    return list(every.split(sizes))


def divide(block: Any, group: Any) -> slice:
    """Leave this rank's experts in a block. Return which they are."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    each = block.experts.num_experts // ranks
    mine = slice(each * own, each * (own + 1))
    for name, weight in list(block.experts.named_parameters()):
        setattr(block.experts, name, torch.nn.Parameter(weight.detach()[mine].clone()))
    return mine


def to_one_expert(block: Any) -> None:
    """Let all tokens choose the first two experts."""
    router = getattr(block, "gate", getattr(block, "router", None))
    with torch.no_grad():
        router.weight[:2], router.weight[2:] = 0.1, -0.1
        for bias in (*block.buffers(), *(p for n, p in router.named_parameters() if n == "bias")):
            bias.zero_()


def relative(found: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    difference = float((found.detach().double() - expected.detach()).norm())
    return difference / max(float(expected.norm()), floor, 1e-30)


def compare(family: str, sizes: dict[str, int], tokens: tuple[int, ...], one_expert: bool) -> None:
    ranks = join(RankLayout(expert=len(tokens)), device="cpu", stall_timeout=60)
    block, config = block_of(family, **sizes)
    if one_expert:
        to_one_expert(block)
    xs = tokens_of(config, tokens)
    if one_expert:
        xs = [x.abs() for x in xs]
    slopes = [torch.randn(x.shape, generator=torch.Generator().manual_seed(5 + n)) for n, x in enumerate(xs)]
    exact = {name: value.detach().double().requires_grad_() for name, value in block.state_dict().items()}
    xs64 = [x.double().requires_grad_() for x in xs]
    expected = [oracle.outputs(family, config, exact, x)[0] if len(x) else x for x in xs64]
    sum((y * slope.double()).sum() for y, slope in zip(expected, slopes, strict=True)).backward()  # type: ignore

    group_experts(block)
    mine = divide(block, ranks.group("expert"))
    block.experts.ranks = ExpertRanks(ranks.group("expert"))
    x = xs[ranks.rank].clone().requires_grad_()
    output = block(x[None])
    output = (output[0] if isinstance(output, tuple) else output)[0]
    (output * slopes[ranks.rank]).sum().backward()

    own64 = xs64[ranks.rank]
    scale = max(float(value.grad.norm()) for value in exact.values() if value.grad is not None)
    found = {
        "output": relative(output, expected[ranks.rank], 0.0),
        "input": 0.0 if own64.grad is None else relative(x.grad, own64.grad, 1e-3),
    }
    for name, weight in block.named_parameters():
        gradient, whole = weight.grad, exact[name].grad
        assert gradient is not None, name
        if name.startswith("experts."):
            whole = whole[mine]
        else:  # every rank has a part, of its own tokens
            dist.all_reduce(gradient, group=ranks.group("expert"))
        found[name] = relative(gradient, whole, 1e-3 * scale)
    wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
    assert not wrong, wrong
    if one_expert and mine.start >= 2:
        assert not block.experts.down_proj.grad.any()


def compare_all(family: str, many: int) -> None:
    compare(family, {}, EVEN[:many], False)
    compare(family, ODD, UNEVEN[:many], False)
    compare(family, {}, UNEVEN[-many:], True)


@pytest.mark.parametrize("many", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_plain_loops(family: str, many: int) -> None:
    on_ranks(many, compare_all, family, many)
