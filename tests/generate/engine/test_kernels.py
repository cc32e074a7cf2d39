"""The sampler's kernels against plain torch: on a GPU for real, elsewhere in Triton's interpreter; and compiled for a
Hopper GPU without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selection import long_except
from truestep.generate.engine import serving
from truestep.generate.engine.attend import Rows, attend_rows
from truestep.generate.engine.cache import LayerShape, PagedCache
from truestep.generate.engine.draw import (
    MIX_FIRST,
    MIX_SECOND,
    POSITION_STEP,
    TOKEN_STEP,
    Drawn,
    DrawRows,
    Slice,
    Truncation,
    draw,
)
from truestep.head.logits import HeadSettings
from truestep.ranks.axes import largest_slice, slice_at

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_LENGTHS = (1, 15, 16, 17, 150, 300)


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(serving, "_LENGTHS", SMALL_LENGTHS)
    return


SHAPES = {
    "one to one": LayerShape(2, 64, 64, 2),
    "groups of 2": LayerShape(2, 128, 128, 4),
    "no multiple of 16 bytes": LayerShape(2, 22, 18, 4),
    "groups of 7": LayerShape(2, 64, 64, 14),
    "groups of 5, window": LayerShape(1, 256, 256, 5, window=40),
    "softcap": LayerShape(2, 64, 64, 8, softcap=5.0),
    "softcap, window, odd sizes": LayerShape(3, 24, 40, 6, window=17, softcap=2.0),
    "sinks": LayerShape(2, 16, 16, 8, sinks=True),
    "sinks, window": LayerShape(2, 24, 16, 6, window=17, sinks=True),
    "a window longer than any row": LayerShape(2, 16, 16, 4, window=1000),
    "a window of one token": LayerShape(2, 16, 16, 4, window=1),
    "a window of two": LayerShape(2, 16, 16, 4, window=2),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_attention_is_that_of_plain_torch(name: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.generate.engine import attend_kernels

    if page_size == 16:  # several spans, the last one partly filled
        monkeypatch.setattr(attend_kernels, "span_tokens", lambda programs: 64)
    place = torch.device(DEVICE)
    assert serving.check_attention(place, torch.float32, page_size, [SHAPES[name]]) is None


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.generate.engine import attend_kernels

    right = attend_kernels.attend
    monkeypatch.setattr(attend_kernels, "attend", lambda *given: right(*given[:5], given[5] * 1.01, *given[6:]))
    problem = serving.check_attention(torch.device(DEVICE), torch.float32, 16, [SHAPES["groups of 2"]])
    assert problem is not None
    assert "off by" in problem


def test_it_reads_nothing_beyond_a_rows_own_pages() -> None:
    """What is not this row's may be anything, NaN included."""
    from truestep.generate.engine.attend_kernels import attend

    generator = torch.Generator().manual_seed(1)
    pools = [torch.randn(5, 2, 16, 32, generator=generator).to(DEVICE) for _ in range(2)]
    clean = PagedCache([pools[0].clone()], [pools[1].clone()])
    dirty = PagedCache([pools[0]], [pools[1]])
    dirty.keys[0][3:] = torch.nan
    dirty.values[0][3:] = torch.nan
    dirty.locate()
    table = torch.tensor([[0, 1, 2, 4, 4]], device=DEVICE)
    lines = torch.cat([torch.tensor([[2, 3, 36]], device=DEVICE), table], dim=1)
    q, k, v = (torch.randn(1, heads, 32, generator=generator).to(DEVICE) for heads in (4, 2, 2))
    answers = [
        one(Rows(cache, lines[:, 0], lines[:, 1], lines[:, 2], lines[:, 3:], 80, one), 0, q, k, v, 0.2, None, None)
        for cache, one in ((dirty, attend), (clean, attend_rows))
    ]
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("vocabulary", [1, 61, 1024, 9001])
def test_draws_are_those_of_plain_torch(
    vocabulary: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_VOCABULARY", vocabulary)
    assert serving.check_draw(torch.device(DEVICE), HeadSettings(softcap=softcap, scale=0.8)) is None


def test_a_wrong_exchange_of_slices_is_noticed() -> None:
    vocabulary = serving._VOCABULARY
    for ranks in (2, 4, 8):
        first, size = slice_at(vocabulary, ranks, ranks - 1)
        assert 0 < size < largest_slice(vocabulary, ranks)

        def gather(part: torch.Tensor, ranks: int = ranks) -> torch.Tensor:
            return torch.full((ranks, *part.shape), 3, device=part.device)

        part = Slice(
            first, size, largest_slice(vocabulary, ranks), vocabulary, gather, lambda _: pytest.fail("not cut")
        )
        problem = serving.check_draw(torch.device(DEVICE), HeadSettings(), part)
        assert problem is not None and "it draws" in problem


@pytest.mark.long
@pytest.mark.parametrize(("vocabulary", "ranks"), [(521, 2), (543, 2), (61, 4), (57, 4)])
def test_draws_from_slices_are_those_of_the_whole(vocabulary: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last rank has less, where a rank's slice is several parts, and where two ranks share a block."""
    from truestep.generate.engine import draw_kernels

    monkeypatch.setattr(draw_kernels, "_PART", 256)
    count = 10 if vocabulary < 100 else 5
    raw = (3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(2))).to(DEVICE)
    raw[4] = -torch.inf
    raw[4, vocabulary - 1] = 1.0  # all that can be drawn is the last rank's
    keys = torch.arange(count, device=DEVICE)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0] * (count // 5), device=DEVICE)
    rows, most = DrawRows(keys, keys * 3, temperature), -(-vocabulary // ranks)
    cut = replace(rows, truncation=Truncation(temperature.clamp(max=0.9), keys * 0, keys * 0.0))
    kept: dict[int, torch.Tensor] = {}

    def from_slice(rank: int, cut_as: Drawn | None = None) -> Drawn:
        def gather(part: torch.Tensor) -> torch.Tensor:
            assert most % 16 == 0, "ranks that share a block"
            kept[rank] = part
            return torch.stack([kept.get(other, part) for other in range(ranks)])

        own = raw[:, rank * most : (rank + 1) * most].clone()
        here = Slice(rank * most, own.shape[1], most, vocabulary, gather, lambda _: raw.clone())
        if cut_as is not None:
            found = draw_kernels.draw(own.clone(), cut, HeadSettings(), here)
            assert torch.equal(found.tokens, cut_as.tokens), "every rank has all logits of rows that are cut off"
        return draw_kernels.draw(own, rows, HeadSettings(), here)

    for rank in range(ranks):
        from_slice(rank)
    expected, cut_as = draw(raw.clone(), rows, HeadSettings()), draw_kernels.draw(raw.clone(), cut, HeadSettings())
    for rank in range(ranks):
        found = from_slice(rank, cut_as)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    raw[3] = torch.nan
    cut_as = draw_kernels.draw(raw.clone(), cut, HeadSettings())
    for rank in range(ranks):
        found = from_slice(rank, cut_as)
        assert 0 <= found.tokens[3] < vocabulary
        assert found.logprobs[3].isnan()


def key_for(counter: int, bits: int) -> int:
    """Find the key of a completion whose first draw has these bits for a block's or a token's counter."""
    word = 2**64

    def unshifted(x: int, by: int) -> int:
        found = x
        for _ in range(64 // by + 1):
            found = x ^ (found >> by)
        return found

    def unmixed(x: int) -> int:
        x = unshifted(x, 31) * pow(MIX_SECOND, -1, word) % word
        return unshifted(unshifted(x, 27) * pow(MIX_FIRST, -1, word) % word, 30)

    row = (unmixed(bits) - counter * TOKEN_STEP) % word
    key = (unmixed(row) - POSITION_STEP) % word
    return key - word if key >= word // 2 else key


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 1}])
@pytest.mark.parametrize("counter", [-4, 54], ids=["the block's number", "the token's number"])
def test_a_number_that_is_rounded_to_one_draws_nothing_impossible(counter: int, cut: dict[str, float]) -> None:
    from truestep.generate.engine import draw_kernels

    raw = torch.zeros(1, 100, device=DEVICE)
    raw[0, 53] = 40.0
    one, zero = torch.ones(1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    truncation = Truncation(one * cut.get("top_p", 1.0), zero + int(cut.get("top_k", 0)), one * 0) if cut else None
    rows = DrawRows(zero + key_for(counter, 2**64 - 5), zero, one, truncation)
    for draws in (draw, draw_kernels.draw):
        assert draws(raw.clone(), rows, HeadSettings()).tokens.tolist() == [53]


def test_draws_are_from_the_distribution() -> None:
    from truestep.generate.engine import draw_kernels

    count, vocabulary = 4000, 37  # three blocks, the last one partly filled
    z = torch.tensor([1.0, 0.0, -1.0, 2.0, -30.0], device=DEVICE).repeat(8)[:vocabulary]
    numbers = torch.arange(count, device=DEVICE)
    rows = DrawRows(numbers * 7919, numbers % 7, torch.full((count,), 0.8, device=DEVICE))
    for one in (draw, draw_kernels.draw) if DEVICE == "cuda" else (draw,):
        found = one(z.expand(count, vocabulary).contiguous(), rows, HeadSettings())
        seen = found.tokens.bincount(minlength=vocabulary) / count
        p = (z / 0.8).softmax(0)
        assert ((seen - p).abs() < 5 * (p / count).sqrt() + 1e-6).all()
        torch.testing.assert_close(found.logprobs, p.log()[found.tokens].double(), rtol=0, atol=1e-5)


def test_equal_logits_are_cut_in_the_order_of_their_ids() -> None:
    """In half precision many are equal."""
    from truestep.generate.engine import draw_kernels

    raw = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0, 1.0]]).repeat(60, 1).to(DEVICE)
    keys = torch.arange(60, device=DEVICE)
    whole = torch.ones(60, device=DEVICE)
    cut = Truncation(whole, torch.full((60,), 3, device=DEVICE), torch.zeros(60, device=DEVICE))
    rows = DrawRows(keys, keys % 3, whole, cut)
    tokens = draw(raw.clone(), rows, HeadSettings()).tokens
    assert set(tokens.tolist()) == {0, 1, 2}
    assert torch.equal(draw_kernels.draw(raw.clone(), rows, HeadSettings()).tokens, tokens)


def test_logits_that_are_no_numbers_draw_a_token_all_the_same() -> None:
    from truestep.generate.engine import draw_kernels

    raw = torch.full((2, 40), torch.nan, device=DEVICE)
    keys = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    found = draw_kernels.draw(raw, DrawRows(keys, keys, torch.ones(2, device=DEVICE)), HeadSettings())
    assert (found.tokens >= 0).all()
    assert (found.tokens < 40).all()
    assert found.logprobs.isnan().all()


@pytest.mark.parametrize("count", [0, 1, 511, 512, 5000])
def test_copies_are_what_was_copied(count: int) -> None:
    """On a GPU between its memory and the host's."""
    from truestep.generate.engine.copy_kernels import copy

    source = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))
    there, back = torch.zeros(count + 8, dtype=torch.int64, device=DEVICE), torch.zeros(count + 8, dtype=torch.int64)
    if DEVICE == "cuda":
        source, back = source.pin_memory(), back.pin_memory()
    copy(there[:count], source)
    copy(back, there)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back[:count], source)
    assert not back[count:].any()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux alone")
@pytest.mark.parametrize("which", long_except(["some", "all"], "some"))
def test_the_kernels_compile_for_a_hopper_gpu(which: str) -> None:
    worker = Path(__file__).parent / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(worker), which], capture_output=True, text=True, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "compiled"
