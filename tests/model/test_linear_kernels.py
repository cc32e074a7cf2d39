"""Kernels of recurrent layers, as far as it shows without a GPU: what the package's functions are given, with loops in
their place, and that the check at load names what is wrong. benchmarks/recurrent.py has the real kernels."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from model.test_recurrence import OPERATIONS, run, spans_of
from oracles import recurrent
from truestep.model.mixers import linear_kernels
from truestep.weights.errors import ModelError

LENGTHS = [5, 1, 33, 17]
CPU = torch.device("cpu")
KERNELS = ["convolution", "gated delta rule", "KDA", "Mamba-2"]


def documents(bounds: Tensor, host: Tensor) -> list[slice]:
    assert bounds.dtype == torch.int32 and bounds.tolist() == host.tolist()
    return [slice(*pair) for pair in itertools.pairwise(bounds.tolist())]


def causal_conv1d(
    x: Tensor,  # [1, T, C]
    weight: Tensor,
    bias: Tensor | None,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    activation: str | None,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor]:
    outputs, states = [], []
    for number, here in enumerate(documents(cu_seqlens, cu_seqlens_cpu)):
        own = x[:, here].transpose(1, 2)
        before = torch.zeros_like(own[:, :, :1]).repeat(1, 1, weight.shape[1])
        if initial_state is not None:
            before = initial_state[number][None]
        whole = torch.cat([before, own], dim=2)
        outputs.append(recurrent.convolution(whole, weight, bias, activation)[:, :, before.shape[2] :])
        states.append(whole[0, :, -weight.shape[1] :])
    assert output_final_state
    return torch.cat(outputs, dim=2).transpose(1, 2), torch.stack(states)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor]:
    assert output_final_state and use_qk_l2norm_in_kernel and initial_state is None and g.dtype == torch.float32
    found = [
        recurrent.delta_rule(*(each[:, here] for each in (q, k, v, g, beta)))
        for here in documents(cu_seqlens, cu_seqlens_cpu)
    ]
    return torch.cat([output for output, _ in found], dim=1), torch.stack([state for _, state in found])


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor]:
    assert output_final_state and initial_state is None and q.shape[2] == v.shape[2]
    rows, finals = [], []
    for here in documents(cu_seqlens, cu_seqlens_cpu):
        state = v.new_zeros(v.shape[2], k.shape[3], v.shape[3])
        for now in range(here.start, here.stop):
            state = g[0, now].exp()[:, None, None] * state + k[0, now][:, :, None] * v[0, now][:, None, :]
            rows.append(scale * torch.einsum("hk,hkv->hv", q[0, now], state))
        finals.append(state)
    return torch.stack(rows)[None], torch.stack(finals)


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels add up in float32, whatever they are given."""

    def wide(*given: Any, **named: Any) -> Any:
        tensors = [value.float() if torch.is_tensor(value) else value for value in given]
        output, final = function(*tensors, **named)
        return output.to(given[0].dtype), final

    return wide


def leaking(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that takes all documents for one."""

    def wrong(*given: Any, cu_seqlens: Tensor, **named: Any) -> Any:
        ends = cu_seqlens[[0, -1]]
        return function(*given, **named | {"cu_seqlens": ends, "cu_seqlens_cpu": ends})

    return wrong


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*given: Any, **named: Any) -> Any:
        output, final = function(*given, **named)
        return 1.05 * output, final

    return wrong


def in_place_of_the_package(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda kernel: kernel
) -> None:
    functions = {
        "fla.modules.causal_conv1d": {"causal_conv1d": causal_conv1d},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule},
        "fla.ops.kda": {"chunk_kda": delta_rule},
        "fla.ops.simple_gla": {"chunk_simple_gla": simple_gla},
    }
    for name in ("fla", "fla.modules", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, those in functions.items():
        module = ModuleType(name)
        vars(module).update({key: change(in_float32(value)) for key, value in those.items()})
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_given_what_plain_torch_computes_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of_the_package(monkeypatch)
    operation = OPERATIONS[name]
    arguments = operation.arguments(sum(LENGTHS))
    expected, final = run(operation, arguments, LENGTHS)
    spans = spans_of(LENGTHS)
    bounds = torch.tensor([0, *(end for _, end in spans)], dtype=torch.int32)
    call = operation.call(arguments)
    call = type(call)(call.function, call.arguments, kernels=True)
    output, last = operation.recurrence.packed(call, bounds, max(LENGTHS), spans, None)
    output = output[0] if isinstance(output, tuple) else output
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, final, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KERNELS)
def test_the_check_passes_what_is_right_and_names_what_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OPERATIONS[name]
    call = operation.call(operation.arguments(3))
    monkeypatch.setattr(linear_kernels, "_LENGTHS", (1, 19, 6, 40, 2))
    in_place_of_the_package(monkeypatch)
    assert linear_kernels.compare(operation.recurrence, call, torch.bfloat16, CPU) is None
    for change in (leaking, scaled):
        in_place_of_the_package(monkeypatch, change)
        problem = linear_kernels.compare(operation.recurrence, call, torch.bfloat16, CPU)
        assert problem is not None and " off by " in problem


def test_without_a_gpu_plain_torch_computes() -> None:
    operation = OPERATIONS["gated delta rule"]
    seen = [(operation.recurrence, operation.call(operation.arguments(3)))]
    for wanted in ("auto", "torch", "flash"):
        assert linear_kernels.choose(wanted, seen, torch.bfloat16, CPU) == linear_kernels.BY_TORCH
    assert linear_kernels.problem(*seen[0], torch.bfloat16, CPU) == "it needs a GPU"


def test_a_kernel_that_fails_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OPERATIONS["gated delta rule"]
    seen = [(operation.recurrence, operation.call(operation.arguments(3)))]
    name = operation.function.__name__
    monkeypatch.setattr(linear_kernels, "problem", lambda *_: "it failed on this machine: RuntimeError: refused")
    found = linear_kernels.choose("auto", seen, torch.bfloat16, torch.device("cuda"))
    assert not found.names and f"torch for {name}: it failed on this machine" in found.story
    with pytest.raises(ModelError, match=f"cannot be used for {name}: it failed"):
        linear_kernels.choose("flash", seen, torch.bfloat16, torch.device("cuda"))
