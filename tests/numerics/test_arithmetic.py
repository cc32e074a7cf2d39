"""Rows are computed alike in any company: in plain torch, and by the kernels (on a GPU, or in Triton's interpreter)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interpreted import HALF, ON_GPU, use
from truestep.numerics import arithmetic, plain

DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(params=["plain", "kernels"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return use(request.param, monkeypatch)


def random(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(device, dtype)


def alike(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    """Hold rows computed alone, in other numbers and in another order against those computed together."""
    together = compute(rows)
    count = len(rows)
    for first, end in ((0, 1), (count - 1, count), (1, 4), (3, count), (0, count - 2)):
        assert torch.equal(compute(rows[first:end].clone()), together[first:end])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(rows.device)
    assert torch.equal(compute(rows[order]), together[order])


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("columns", "terms"), [(7, 16), (130, 100), (64, 64)])
def test_products(columns: int, terms: int, dtype: torch.dtype, device: torch.device) -> None:
    a = random(141, terms, dtype=dtype, device=device)
    b, bias = random(columns, terms, dtype=dtype, device=device), random(columns, dtype=dtype, device=device)
    alike(lambda rows: arithmetic.product(rows, b, bias), a)
    alike(lambda rows: arithmetic.product(rows, b, dtype=torch.float32), a)
    right = a.double() @ b.double().T
    torch.testing.assert_close(arithmetic.product(a, b, dtype=torch.float32).double(), right, rtol=1e-5, atol=1e-4)
    rounded = (right + bias.double()).to(dtype)
    torch.testing.assert_close(
        arithmetic.product(a, b, bias), rounded, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-4
    )


def test_a_tile_with_other_bits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use("kernels", monkeypatch)
    from truestep.numerics import kernels

    computed, common = kernels._computed, kernels._COMMON
    odd = kernels._TILES[-1][1]

    def planted(a: torch.Tensor, b: torch.Tensor, bias: Any, dtype: torch.dtype, tile: dict[str, int]) -> torch.Tensor:
        result = computed(a, b, bias, dtype, tile if tile is odd else common)
        if tile is odd:
            result[3, 5] = torch.nextafter(result[3, 5], result[3, 5] + 1)
        return result

    monkeypatch.setattr(kernels, "_computed", planted)
    try:
        kernels.tiles.cache_clear()
        assert kernels.tiles(HALF, device) == kernels._TILES[:-1]
        monkeypatch.setattr(kernels, "_same", lambda *_: False)
        kernels.tiles.cache_clear()
        assert [tile for _, tile in kernels.tiles(HALF, device)] == [common]
        for rows in (1, 100, 5000):
            assert kernels._tile_for(rows, 64, HALF, device) is common
    finally:
        kernels.tiles.cache_clear()


@pytest.mark.parametrize("rows", [1, 64, 65, 300, 5000])
def test_few_rows_have_small_tiles(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use("kernels", monkeypatch)
    from truestep.numerics import kernels

    monkeypatch.setattr(kernels, "tiles", lambda *_: kernels._TILES)
    monkeypatch.setattr(kernels, "_processors", lambda _: 132)
    device = torch.device("cpu")
    areas = []
    for columns in (64, 1024, 6144, 150_000):
        tile = kernels._tile_for(rows, columns, torch.bfloat16, device)
        areas.append(tile["BLOCK_M"] * tile["BLOCK_N"])
        assert rows > 64 or tile["BLOCK_M"] == 64
        assert areas[-1] == 64 * 16 or kernels._programs(tile, rows, columns) >= 92
    assert areas == sorted(areas)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("terms", [5, 64, 3000])
def test_sums(terms: int, dtype: torch.dtype, device: torch.device) -> None:
    count = 37 if terms < 1000 else 7
    x = random(count, terms, dtype=dtype, device=device)
    for function, right in ((arithmetic.row_sum, x.double().sum(-1)), (arithmetic.row_mean, x.double().mean(-1))):
        alike(function, x)
        torch.testing.assert_close(function(x).double(), right, rtol=1e-5, atol=1e-4)
    deep = x.view(count, 1, terms)
    assert torch.equal(arithmetic.row_sum(deep), arithmetic.row_sum(x)[:, None])


@pytest.mark.parametrize("columns", [11, 9000])
def test_log_sum_exps(columns: int, device: torch.device) -> None:
    z = 30 * random(9, columns, device=device)
    alike(arithmetic.logsumexp, z)
    torch.testing.assert_close(arithmetic.logsumexp(z).double(), z.double().logsumexp(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.exp, torch.tanh, torch.sin, torch.cos])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_functions_do_not_ask_for_an_elements_place(function: Any, dtype: torch.dtype) -> None:
    x = random(500, 77, dtype=dtype, device=torch.device("cpu"))
    alike(lambda rows: plain.each(function, rows), x)
    torch.testing.assert_close(plain.each(function, x), function(x))


def test_added_zeros_change_nothing() -> None:
    """Which is why what a token does not see may be in the sum."""
    a, b = (random(5, 40, device=torch.device("cpu")) for _ in range(2))
    longer = [torch.nn.functional.pad(tensor, (0, 160)) for tensor in (a, b)]
    assert torch.equal(plain.product(*longer), plain.product(a, b))


def test_torchs_own_arithmetic_would_be_noticed() -> None:
    """The comparisons above can fail: a function of torch's own, on a CPU, rounds by an element's place."""
    if DEVICE == "cpu":
        with pytest.raises(AssertionError):
            alike(torch.nn.functional.silu, random(500, 77, device=torch.device("cpu")))
    with pytest.raises(AssertionError):  # the order of a sum is the whole tensor's
        alike(lambda rows: rows.cumsum(0), random(20, 7, device=torch.device(DEVICE)))


def test_a_split_sum_would_be_noticed(device: torch.device) -> None:
    """As a product does that cuts long sums in parts where there are few rows."""

    def split(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > 16:
            return arithmetic.product(rows, weight)
        halves = [arithmetic.product(rows[:, part], weight[:, part]) for part in (slice(0, 64), slice(64, 128))]
        return halves[0] + halves[1]

    weight = random(40, 128, device=device)
    with pytest.raises(AssertionError):
        alike(split, random(50, 128, device=device))
