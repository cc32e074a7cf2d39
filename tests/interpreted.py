"""Triton's interpreter with products that keep rows apart: NumPy's own round a row by its place."""

from __future__ import annotations

from types import ModuleType
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


def patch_the_language_once() -> None:
    """Have Triton's interpreter replace the language's functions once a launch.

    On its own it does so again whenever a kernel calls another function: an eighth of the time of a test of kernels.
    """
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    languages = (interpreter.tl, interpreter.tl.core)
    seen: dict[Any, frozenset[int]] = {}  # of each function, which languages it has
    patched: set[int] = set()  # in the launch that goes on

    def patch_once(function: Any) -> Any:
        if function not in seen:
            seen[function] = frozenset(n for n in (0, 1) if languages[n] in _modules(function))
        if seen[function] <= patched:
            return None
        scope = patch_language(function)
        patched.update(seen[function])
        if scope is None:  # of an older Triton, which does not restore the language
            return None
        restore = scope.restore

        def end() -> None:
            patched.clear()
            restore()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch_once


def _modules(function: Any) -> list[Any]:
    return [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
