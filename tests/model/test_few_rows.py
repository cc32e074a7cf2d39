"""Kernels for few rows an expert, by Triton's interpreter where there is no GPU, against plain loops."""

from __future__ import annotations

import pytest
import torch

from interpreted import HALF, use


@pytest.mark.parametrize(
    ("sizes", "inner", "columns"),
    [((1, 0, 1, 0, 0), 40, 24), ((0, 3, 0, 2, 0), 130, 70), ((0, 19, 33, 0), 64, 64), ((0, 0, 1), 8, 8)],
)
@pytest.mark.parametrize("by_rows", [True, False])
def test_each_row_is_multiplied_by_its_experts_matrix(
    sizes: tuple[int, ...], inner: int, columns: int, by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = use("kernels", monkeypatch)
    from truestep.model.experts.few_rows_kernel import product_of_few

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), inner, generator=generator).to(HALF)
    matrices = torch.randn(len(sizes), inner, columns, generator=generator).to(HALF)
    ends = torch.tensor(sizes).cumsum(0).int()
    numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    expected = torch.stack([row.double() @ matrices[at].double() for row, at in zip(rows, numbers, strict=True)])
    if by_rows:
        matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    found = product_of_few(rows.to(device), matrices.to(device), ends.to(device))
    assert found.dtype == HALF
    torch.testing.assert_close(found.double().cpu(), expected, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 2, 5), (9, 3, 8), (70, 2, 4), (3, 1, 40)])
def test_choices_are_sorted_as_by_a_stable_sort(
    tokens: int, chosen: int, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = use("kernels", monkeypatch)
    from truestep.model.experts.few_rows_kernel import sort_choices

    index = torch.randint(experts, (tokens, chosen), generator=torch.Generator().manual_seed(tokens))
    order, places, ends = (found.cpu() for found in sort_choices(index.to(device), experts))
    expected = sorted(range(index.numel()), key=index.flatten().tolist().__getitem__)
    assert order.tolist() == expected
    assert [expected[place] for place in places.tolist()] == list(range(index.numel()))
    assert ends.tolist() == [int((index < expert + 1).sum()) for expert in range(experts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [4, 24, 128])
def test_the_highest_scores_are_found_in_order(
    experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = use("kernels", monkeypatch)
    from truestep.model.experts.few_rows_kernel import top_scores

    scores = torch.randn(6, experts, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[1] = scores[1].round()  # many are equal, with both zeros
    scores[2] = 0.0
    scores[2, 2] = -0.0
    scores[3, :-1] = -torch.inf
    scores[4, 3] = torch.inf
    scores[5] = -scores[5].abs()
    found = top_scores(scores.to(device), 3).cpu()
    for row, chosen in zip(scores.tolist(), found.tolist(), strict=True):
        assert chosen == sorted(range(experts), key=lambda expert: (-row[expert], expert))[:3]
