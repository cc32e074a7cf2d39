"""Models computed exactly: what is replaced agrees with torch, and what is not known is refused by name."""

from __future__ import annotations

import pytest
import torch

from truestep.numerics.operations import Exactly, InexactError, by_itself

X = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(33, 48, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.nn.functional.linear(x, WEIGHT, WEIGHT[:, 0]),
        lambda x: torch.nn.functional.linear(x[None], WEIGHT),
        lambda x: x @ WEIGHT.T,
        lambda x: x.pow(2).mean(-1, keepdim=True),
        lambda x: x.sum(-1),
        lambda x: x.softmax(-1),
        lambda x: torch.nn.functional.layer_norm(x, (48,), WEIGHT[0], WEIGHT[1]),
        lambda x: torch.nn.functional.rms_norm(x, (48,), WEIGHT[0], 1e-6),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x: torch.add(x, x, alpha=1),
        lambda x: x[:, :, None] @ x[:, None, :],
        lambda x: x[None].expand(3, -1, 48) @ WEIGHT.T[None].expand(3, 48, 33),
    ],
)
def test_what_is_replaced_agrees_with_torch_and_keeps_rows_apart(compute) -> None:  # type: ignore[no-untyped-def]
    with Exactly():
        found, row = compute(X), compute(X[3:4])
    torch.testing.assert_close(found, compute(X), rtol=1e-5, atol=1e-5)
    at = found[:, 3:4] if found.dim() == 3 and len(found) != 9 else found[3:4]
    assert torch.equal(at, row)


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (lambda x: x.cumsum(0), "cumsum"),
        (lambda x: x.mean(0), "another dimension than the last"),
        (lambda x: torch.nn.functional.conv1d(x[None], WEIGHT[:, :9, None]), "convolution"),
        (lambda x: torch.add(x, x, alpha=0.3), "add"),
    ],
)
def test_an_operation_that_is_not_known_is_refused_by_name(compute, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InexactError, match=named), Exactly():
        compute(X)


def test_code_that_is_exact_by_itself_is_left_alone() -> None:
    with Exactly():
        with by_itself():
            X.cumsum(0)
        with pytest.raises(InexactError):
            X.cumsum(0)
    X.cumsum(0)
    with by_itself():
        X.cumsum(0)
