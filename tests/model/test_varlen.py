"""What is given to torch's attention over documents: nothing is copied that its kernel reads as it lies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torchs

from truestep.model.mixers import attention
from truestep.model.mixers.attention import make_layout

LENGTHS = (3, 9, 1)
TOKENS, QUERIES, KEYS, SIZE = sum(LENGTHS), 6, 2, 16
Given = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def attend(q: Any, k: Any, v: Any, bounds: torch.Tensor, longest: int, window: tuple[int, int]) -> torch.Tensor:
    outputs = []
    for start, end in itertools.pairwise(bounds.tolist()):
        if end > start:
            one = make_layout(torch.tensor([0, end - start]), q.device)
            seen = None if window[0] < 0 else window[0] + 1
            outputs.append(attention._rows(*(t[start:end] for t in (q, k, v)), one, 0.25, seen, None))
    return torch.cat(outputs)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """What a stand-in of torch's kernel was given. Its torch does not say whether heads may be shared, as 2.11 does
    not."""
    calls: Given = []

    def varlen_attn(
        q: Any, k: Any, v: Any, a: Any, b: Any, m: int, n: int, *, scale: Any = None, window_size: Any = (-1, -1)
    ) -> torch.Tensor:
        calls.append((q, k, v))
        return attend(q, k, v, a, m, window_size)

    use(monkeypatch, varlen_attn)
    return calls


def use(monkeypatch: pytest.MonkeyPatch, varlen_attn: Any) -> None:
    monkeypatch.setattr(torchs, "varlen_attn", varlen_attn)
    attention._shares_heads.cache_clear()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    attention._shares_heads.cache_clear()


def inputs(beside: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give queries, keys, and values that are a part of a product of `beside` columns more."""
    generator = torch.Generator().manual_seed(0)
    width = (QUERIES + 2 * KEYS) * SIZE + beside
    product = torch.randn(TOKENS, width, generator=generator)
    q, k = (torch.randn(TOKENS, heads, SIZE, generator=generator) for heads in (QUERIES, KEYS))
    return q, k, product[:, (QUERIES + KEYS) * SIZE : (QUERIES + 2 * KEYS) * SIZE].view(TOKENS, KEYS, SIZE)


def run(tensors: tuple[torch.Tensor, ...], window: int | None = None) -> torch.Tensor:
    layout = make_layout(torch.tensor([0, *itertools.accumulate(LENGTHS)]), torch.device("cpu"))
    return attention._varlen(*tensors, layout, 0.25, window)


@pytest.mark.parametrize("window", [None, 2])
def test_a_part_of_a_product_is_read_as_it_lies(given: Given, window: int | None) -> None:
    tensors = inputs()
    with torch.no_grad():
        found = run(tensors, window)
        expected = run(tuple(one.contiguous() for one in tensors), window)
    assert torch.equal(found, expected)
    assert [one.data_ptr() for one in given[-2]] == [one.data_ptr() for one in tensors]
    assert [one.shape for one in given[-2]] == [one.shape for one in tensors], "no head is repeated"


def test_rows_that_are_not_aligned_are_copied(given: Given) -> None:
    q, k, v = inputs(beside=1)
    with torch.no_grad():
        assert torch.equal(run((q, k, v)), run((q, k, v.contiguous())))
    assert given[-2][2].is_contiguous() and given[-2][2].data_ptr() != v.data_ptr()
    with torch.no_grad():
        run((q.transpose(0, 1).contiguous().transpose(0, 1), k, v[..., ::2].repeat(1, 1, 2)))
    assert given[-1][0].is_contiguous(), "the output is laid out as the queries are"


def test_training_gives_it_what_it_gave(given: Given) -> None:
    tensors = inputs()
    run(tensors)
    q, k, v = given[-1]
    assert q is tensors[0]
    assert k.shape == v.shape == q.shape and k.is_contiguous() and v.is_contiguous()


@pytest.mark.parametrize("refuses", [True, False])
def test_heads_are_repeated_where_the_kernel_does_not_share_them(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Given = []

    def varlen_attn(
        q: Any, k: Any, v: Any, a: Any, b: Any, m: int, n: int, *, scale: Any = None, window_size: Any = (-1, -1)
    ) -> torch.Tensor:
        if k.shape[1] != q.shape[1]:
            if refuses:
                raise ValueError("as many heads, please")
            return torch.zeros_like(q)
        calls.append((q, k, v))
        return attend(q, k, v, a, m, window_size)

    use(monkeypatch, varlen_attn)
    tensors = inputs()
    with torch.no_grad():
        found = run(tensors)
    q, k, v = tensors
    expected = attend(q, k, v, torch.tensor([0, *itertools.accumulate(LENGTHS)]), max(LENGTHS), (-1, 0))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert calls[-1][1].shape == q.shape


def test_a_torch_that_shares_heads_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def varlen_attn(
        q: Any, k: Any, v: Any, a: Any, b: Any, m: int, n: int, *, scale: Any, window_size: Any, enable_gqa: bool
    ) -> torch.Tensor:
        told.append(enable_gqa)
        return attend(q, k, v, a, m, window_size)

    use(monkeypatch, varlen_attn)
    run(inputs())
    assert told == [True]
