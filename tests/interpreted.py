"""Triton's interpreter with products that keep rows apart: NumPy's own round a row by its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
# The interpreter multiplies bfloat16 by its bits; float16 is what it knows.
HALF = torch.bfloat16 if ON_GPU else torch.float16


def use(which: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Have `plain` torch or the `kernels` compute; give the device."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if which == "plain":
        return torch.device("cpu")
    pytest.importorskip("triton")
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(np, "matmul", _product)
    return torch.device("cuda" if ON_GPU else "cpu")


def _product(a: np.ndarray, b: np.ndarray, dtype: Any = None, **_: Any) -> np.ndarray:
    kind = dtype or np.result_type(a, b)
    total = np.zeros((*a.shape[:-1], b.shape[-1]), kind)
    for term in range(a.shape[-1]):
        total += a[..., term, None].astype(kind) * b[..., None, term, :].astype(kind)
    return total
