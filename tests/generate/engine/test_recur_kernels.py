"""The decode kernels of recurrent operations against plain torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from truestep.generate.engine import serving
from truestep.model.mixers.convolution import Convolution
from truestep.model.mixers.delta_rule import DeltaRule
from truestep.model.mixers.recurrence import Call, Recurrence
from truestep.model.mixers.state_space import Mamba2

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def delta(heads: int, groups: int, key: int, value: int, *, per_channel: bool = False, normed: bool = True) -> Call:
    arguments = {
        "query": torch.zeros(1, 1, groups, key),
        "key": torch.zeros(1, 1, groups, key),
        "value": torch.zeros(1, 1, heads, value),
        "g": torch.zeros(1, 1, heads, *((key,) if per_channel else ())),
        "beta": torch.zeros(1, 1, heads),
        "use_qk_l2norm_in_kernel": normed,
    }
    return Call(delta, arguments)


def mamba2(heads: int, groups: int, size: int, state: int, **changed: Any) -> Call:
    arguments = {
        "hidden_states": torch.zeros(1, 1, heads, size),
        "dt": torch.zeros(1, 1, heads),
        "A": torch.zeros(heads),
        "B": torch.zeros(1, 1, groups, state),
        "C": torch.zeros(1, 1, groups, state),
        "D": torch.zeros(heads),
        "dt_bias": torch.zeros(heads),
        "dt_softplus": True,
        "dt_limit": (0.0, float("inf")),
    }
    return Call(mamba2, arguments | changed)


def convolution(channels: int, taps: int, activation: str | None, bias: bool) -> Call:
    arguments = {
        "hidden_states": torch.zeros(1, channels, 1),
        "weight": torch.zeros(channels, taps),
        "bias": torch.zeros(channels) if bias else None,
        "activation": activation,
    }
    return Call(convolution, arguments)


CASES: dict[str, tuple[Recurrence, Call]] = {
    "one head": (DeltaRule(), delta(1, 1, 16, 16)),
    "heads that share keys": (DeltaRule(), delta(6, 2, 8, 24)),
    "odd sizes, keys as they are": (DeltaRule(), delta(2, 2, 13, 7, normed=False)),
    "a decay for each channel": (DeltaRule(), delta(4, 4, 20, 12, per_channel=True)),
    "a state of several programs": (DeltaRule(), delta(2, 1, 128, 128)),
    "mamba2": (Mamba2(), mamba2(4, 2, 16, 8)),
    "mamba2, odd sizes": (Mamba2(), mamba2(3, 1, 11, 5)),
    "mamba2, bare": (Mamba2(), mamba2(2, 1, 8, 8, D=None, dt_bias=None, dt_softplus=False)),
    "mamba2, steps in bounds": (Mamba2(), mamba2(4, 2, 64, 128, dt_limit=(0.1, 0.2))),
    "convolution": (Convolution(), convolution(40, 4, "silu", False)),
    "convolution of several programs": (Convolution(), convolution(1100, 3, "silu", True)),
    "convolution without more": (Convolution(), convolution(16, 2, None, False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    assert serving.check_states(DEVICE, dtype, [CASES[name]]) is None


@pytest.mark.parametrize(
    ("name", "kernel"), [("one head", "_delta"), ("mamba2", "_mamba2"), ("convolution", "_convolve")]
)
def test_a_wrong_kernel_is_noticed(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.generate.engine import recur_kernels

    right: Callable[..., Any] = getattr(recur_kernels, kernel)
    recurrence, call = CASES[name]
    names = {"one head": "value", "mamba2": "hidden_states", "convolution": "hidden_states"}
    changed = names[name]

    def wrong(given: Call, *others: Any) -> Any:
        return right(given.replaced(**{changed: given.arguments[changed] * 1.01}), *others)

    monkeypatch.setitem(recur_kernels.KERNELS, type(recurrence), wrong)
    assert "off by" in str(serving.check_states(DEVICE, torch.float32, [(recurrence, call)]))


def test_what_has_no_kernel_is_known_by_its_call() -> None:
    from truestep.generate.engine.recur_kernels import has_kernel

    class Own(DeltaRule):
        """Its step may be another."""

    assert has_kernel(*CASES["one head"]) and not has_kernel(Own(), CASES["one head"][1])
    assert has_kernel(*CASES["convolution"]) and not has_kernel(Convolution(), convolution(8, 3, "gelu", False))
    wide = CASES["one head"][1].replaced(value=torch.zeros(1, 1, 1, 16, dtype=torch.float64))
    assert not has_kernel(DeltaRule(), wide)
