"""Attention with sinks: each query head has one more score, which takes a share of the softmax and has no value."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from families.tiny_families import tiny_family
from truestep.model.fast.fused_attention import RECORD, FusedAttention
from truestep.model.fast.fused_layers import fuse_layers
from truestep.model.loading.read import read_directory
from truestep.model.mixers import attention, flash
from truestep.model.mixers.attention import make_layout, packed_attention
from truestep.ranks.group import ALONE
from truestep.ranks.pipeline import Pipeline
from truestep.weights.lazy import read_parameters

BOUNDS = (0, 1, 8, 8, 31, 40)
SCALE = 0.3


def given(queries: int = 4, keys: int = 2, size: int = 8, value_size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    tokens = BOUNDS[-1]
    return [
        random(tokens, queries, size),
        random(tokens, keys, size),
        random(tokens, keys, value_size),
        random(queries),
    ]


def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None) -> torch.Tensor:
    """One query and one head at a time, the softmax written out."""
    group, rows = q.shape[1] // k.shape[1], []
    for start, end in itertools.pairwise(BOUNDS):
        for i in range(start, end):
            first = start if window is None else max(start, i - window + 1)
            heads = []
            for head in range(q.shape[1]):
                weights = ((k[first : i + 1, head // group] @ q[i, head]) * SCALE).exp()
                heads.append(weights @ v[first : i + 1, head // group] / (weights.sum() + sinks[head].exp()))
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None) -> torch.Tensor:
    layout = make_layout(torch.tensor(BOUNDS, dtype=torch.int32), torch.device("cpu"))
    heads = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    how: dict[str, Any] = {"sliding_window": window, "packed_layout": layout, "s_aux": sinks}
    return packed_attention(torch.nn.Module(), *heads, None, SCALE, **how)[0][0]


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("value_size", [8, 6])
def test_packed_documents_have_the_values_and_gradients_of_a_loop(window: int | None, value_size: int) -> None:
    ours, right = given(value_size=value_size), given(value_size=value_size)
    found, expected = packed(*ours, window), loop(*right, window)
    torch.testing.assert_close(found, expected)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for output in (found, expected):
        (output * direction).sum().backward()
    for mine, theirs in zip(ours, right, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_kernel_without_sinks_is_made_one_with_sinks() -> None:
    """From its output and logsumexp alone: values, and what its own backward pass then gives."""
    q, k, v, sinks = given(queries=2, keys=2)
    causal = torch.ones(len(q), len(q)).tril().bool()
    scores = (torch.einsum("qhe,khe->hqk", q, k) * SCALE).masked_fill(~causal, -torch.inf)
    column = sinks[:, None, None].expand(-1, len(q), 1)
    expected = torch.einsum("hqk,khe->qhe", torch.cat([scores, column], -1).softmax(-1)[..., :-1], v)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (expected * direction).sum().backward()
    with torch.no_grad():
        plain = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v)
        output, logsumexp = flash.take_sinks(plain, scores.logsumexp(-1), sinks)
        torch.testing.assert_close(output, expected.detach())
        # FlashAttention's backward pass, which knows of no sinks: weights by the logsumexp, one sum for each row.
        weights = (scores - logsumexp[..., None]).exp()
        along = (direction * output).sum(-1).t()[..., None]
        slopes = weights * (torch.einsum("qhe,khe->hqk", direction, v) - along)
        torch.testing.assert_close(torch.einsum("hqk,khe->qhe", slopes, k) * SCALE, q.grad)
        torch.testing.assert_close(torch.einsum("hqk,qhe->khe", slopes, q) * SCALE, k.grad)
        torch.testing.assert_close(torch.einsum("hqk,qhe->khe", weights, direction), v.grad)
        found = flash._gradient_of_sinks(direction, output, logsumexp, sinks)
        torch.testing.assert_close(found, sinks.grad, rtol=1e-5, atol=1e-5)  # in float32


def test_the_check_at_load_notices_a_kernel_that_swallows_sinks() -> None:
    heads = flash.Heads(4, 2, 16, 16, 0.25, window=9, sinks=True)

    def parents(paths: Any) -> tuple[int, ...]:
        return () if paths is None else flash._PARENTS

    def right(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return flash._plain(heads, parents(rest[-1]), q, k, v, rest[-2])

    def swallowing(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return flash._plain(heads, parents(rest[-1]), q, k, v, rest[-2] * 0 - 30)

    place = torch.device("cpu")
    assert flash.compare(heads, torch.bfloat16, place, right) is None
    found = flash.compare(heads, torch.bfloat16, place, swallowing)
    assert found is not None
    assert "values are off" in found


def test_a_sink_so_low_that_it_is_none_changes_nothing() -> None:
    q, k, v, _ = given()
    low = torch.full((4,), -1e4, dtype=torch.float64)
    layout = make_layout(torch.tensor(BOUNDS, dtype=torch.int32), torch.device("cpu"))
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    plain = packed_attention(torch.nn.Module(), *heads, None, SCALE, packed_layout=layout)[0][0].detach()
    torch.testing.assert_close(packed(q, k, v, low, None), plain)
    assert math.isclose(float(flash.take_sinks(plain, torch.zeros(4, 40), low)[0].sum()), float(plain.sum()))


@pytest.mark.parametrize(("family", "fused"), [("granite_swa", False), ("granite", True)])
def test_fused_layers_do_not_swallow_sinks(family: str, fused: bool, tmp_path: Path) -> None:
    model, _ = read_directory(tiny_family(tmp_path / family, family), False, ALONE, Pipeline())
    read_parameters(model, torch.device("cpu"))
    with attention.using(model, RECORD):
        fuse_layers(model)
    assert any(isinstance(module, FusedAttention) for module in model.modules()) == fused
