"""Exact attention: a token's result depends on it and those before it alone, in pieces, alone or in whole documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from interpreted import HALF, ON_GPU, use
from truestep.numerics import attention
from truestep.numerics.attention import attend
from truestep.numerics.queries import Queries, Span

LENGTHS = (70, 1, 16, 33)
PAGE = 64 if ON_GPU else 16


@pytest.fixture(params=["plain", "kernels"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return use(request.param, monkeypatch)


class Case:
    """Documents, their keys and values in pages that lie anywhere, and one document's queries in any portions."""

    def __init__(
        self,
        place: torch.device,
        heads: int,
        group: int,
        size: int,
        window: int | None,
        cap: float | None,
        sinks: bool,
        dtype: torch.dtype,
    ):
        generator = torch.Generator().manual_seed(0)
        self.place, self.how = place, (size**-0.5, window, cap)
        self.sinks = torch.linspace(-1, 3, heads * group).to(place, dtype) if sinks else None
        pages = [-(-length // PAGE) for length in LENGTHS]
        self.table = np.zeros((len(LENGTHS), max(pages)), dtype=np.int64)
        numbers = torch.randperm(sum(pages), generator=generator).numpy()
        for row, (count, end) in enumerate(zip(pages, np.cumsum(pages), strict=True)):
            self.table[row, :count] = numbers[end - count : end]
        self.pools = [
            torch.randn(sum(pages), heads, PAGE, size, generator=generator).to(place, dtype) for _ in range(2)
        ]
        self.q = [torch.randn(length, heads * group, size, generator=generator).to(place, dtype) for length in LENGTHS]

    def send(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.place)

    def spans(self, wanted: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Attend with tokens [start, end) of documents, all in one pass."""
        spans, first = [], 0
        for document, start, end in wanted:
            spans.append(Span(first, end - start, start, document))
            first += end - start
        q = torch.cat([self.q[document][start:end] for document, start, end in wanted])
        found = attend(Queries(self.send(self.table), spans, self.send), q, *self.pools, *self.how, sinks=self.sinks)
        return list(found.split([end - start for _, start, end in wanted]))

    def rows(self, wanted: list[tuple[int, int]]) -> torch.Tensor:
        """Attend with single tokens, as decoding does."""
        documents, positions = (np.array(values) for values in zip(*wanted, strict=True))
        q = torch.stack([self.q[document][position] for document, position in wanted])
        queries = Queries(self.send(self.table[documents]), [], self.send, rows=self.send(positions))
        return attend(queries, q, *self.pools, *self.how, sinks=self.sinks)

    def reference(self, document: int) -> torch.Tensor:
        """All of a document in float64."""
        scale, window, cap = self.how
        length = LENGTHS[document]
        pages = self.table[document, : -(-length // PAGE)]
        k, v = (pool[pages].transpose(1, 2).flatten(0, 1)[:length].double() for pool in self.pools)
        q = self.q[document].double()
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) * scale
        scores = scores if cap is None else torch.tanh(scores / cap) * cap
        places = torch.arange(length, device=self.place)
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (window or length))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, length, 1)], dim=-1)
        return torch.einsum("hqk,khe->qhe", scores.softmax(-1)[..., :length], v)


CASES = {
    "one to one": (2, 1, 16, None, None, False),
    "groups of 3": (2, 3, 24, None, None, False),
    "window": (1, 2, 16, 9, None, False),
    "softcap, long window": (2, 2, 16, 40, 3.0, False),
    "sinks": (2, 3, 24, None, None, True),
    "sinks, window": (1, 2, 16, 9, None, True),
}


def check(case: Case) -> None:
    whole = case.spans([(number, 0, length) for number, length in enumerate(LENGTHS)])
    for number, found in enumerate(whole):
        torch.testing.assert_close(found.double(), case.reference(number), rtol=2e-2, atol=2e-2)
    assert torch.equal(case.spans([(0, 0, 70)])[0], whole[0])
    cut = case.spans([(3, 5, 33), (0, 21, 70), (0, 0, 3), (2, 15, 16)])
    for part, expected in zip(cut, (whole[3][5:], whole[0][21:], whole[0][:3], whole[2][15:]), strict=True):
        assert torch.equal(part, expected)
    tokens = [(0, 69), (0, 0), (1, 0), (0, 16), (3, 31), (2, 15)]
    assert torch.equal(case.rows(tokens), torch.stack([whole[document][at] for document, at in tokens]))
    assert torch.equal(case.rows(tokens[3:4])[0], whole[0][16])


@pytest.mark.parametrize("name", CASES)
def test_company_and_portions_change_nothing(name: str, place: torch.device) -> None:
    check(Case(place, *CASES[name], HALF))


def test_another_tile_for_single_tokens_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page size of its own is another order of sums."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = Case(torch.device("cpu"), *CASES["groups of 3"], torch.float32)
    rows = attention._attend

    def other(q: torch.Tensor, *rest: object) -> torch.Tensor:
        if q.shape[1] > 1:
            return rows(q, *rest)  # type: ignore[arg-type]
        monkeypatch.setattr(attention.plain, "_BLOCK", 8)
        try:
            return rows(q, *rest)  # type: ignore[arg-type]
        finally:
            monkeypatch.setattr(attention.plain, "_BLOCK", 16)

    monkeypatch.setattr(attention, "_attend", other)
    with pytest.raises(AssertionError):
        check(case)
