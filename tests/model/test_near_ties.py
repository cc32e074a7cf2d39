"""Where a router's scores nearly tie, rounding alone decides which experts compute. A mixture is not refused for that:
not when it is loaded in half precision, nor by the engine. Everything else is still found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from families.tiny_families import tiny_family
from truestep.generate.engine import forward
from truestep.generate.engine.engine import Engine, engine_of
from truestep.model.experts import routers
from truestep.model.experts.routing import RoutedLayer
from truestep.model.loading import load, probe
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.weights.errors import ModelError


def mixture(path: Path, family: str) -> None:
    """Write a tiny model whose experts decide most of its hidden states."""
    tiny_family(path, family)
    file = path / "model.safetensors"
    tensors = {
        name: value * 30 if "experts" in name and "down_proj" in name and "bias" not in name else value
        for name, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


@contextmanager
def nudged(model: Any, when: Callable[[], bool]) -> Iterator[None]:
    """Add noise to what routers read, as another order of sums would, but more of it."""

    def noisy(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        noise = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(given[0])
        return (given[0] + 0.3 * noise, *given[1:]) if when() else given

    hooks = [routed.router.register_forward_pre_hook(noisy) for routed in routers.routed_in(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h"])
@pytest.mark.parametrize("case", ["experts are given", "routers choose", "attention is wrong"])
def test_a_mixture_is_loaded_in_half_precision_whichever_experts_rounding_chooses(
    family: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(tmp_path, family)
    packed, is_packed = probe._packed, False

    def pack(model: Any, *given: Any) -> torch.Tensor:
        nonlocal is_packed
        is_packed = True
        try:
            hidden = packed(model, *given)
        finally:
            is_packed = False
        return hidden.roll(1, dims=0) if case == "attention is wrong" else hidden

    def probing(model: Any, *given: Any) -> None:
        with monkeypatch.context() as patch, nudged(model, lambda: is_packed):
            patch.setattr(probe, "_packed", pack)
            if case == "routers choose":
                patch.setattr(probe, "_routers_answering", lambda _: nullcontext())
            probe.probe_half_precision(model, *given)

    monkeypatch.setattr(load, "probe_half_precision", probing)
    if case == "experts are given":
        assert load_policy(tmp_path, dtype="bfloat16", device="cpu").weights.dtype == torch.bfloat16
    else:
        with pytest.raises(ModelError, match="packed in half precision gives other values"):
            load_policy(tmp_path, dtype="bfloat16", device="cpu")


def served(policy: Policy) -> Engine:
    engine = engine_of(policy)
    assert isinstance(engine, Engine), engine
    return engine


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("case", ["experts are given", "routers choose", "positions are wrong"])
def test_the_engine_serves_a_mixture_whichever_experts_rounding_chooses(
    family: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(tmp_path, family)
    policy = load_policy(tmp_path, dtype="float32", device="cpu")
    engine = served(policy)
    sampling, run, choose = False, forward.run_model, RoutedLayer.choose

    def run_model(policy: Policy, ids: Any, positions: Any, step: Any) -> torch.Tensor:
        nonlocal sampling
        sampling = True
        try:
            return run(policy, ids, positions * 2 if case == "positions are wrong" else positions, step)
        finally:
            sampling = False

    def another(self: RoutedLayer, own: torch.Tensor) -> torch.Tensor:
        if sampling:  # the last of a token's experts is another one
            others = [[e for e in range(self.experts) if e not in row] for row in own.tolist()]
            own = torch.cat([own[:, :-1], torch.tensor([row[:1] for row in others])], dim=1)
        return choose(self, own)

    monkeypatch.setattr(forward, "run_model", run_model)
    monkeypatch.setattr(RoutedLayer, "choose", another)
    if case == "routers choose":
        hidden = Policy.hidden_alone
        monkeypatch.setattr(Policy, "hidden_alone", lambda self, tokens, routes: hidden(self, tokens))
    expected: Any = nullcontext()
    if case != "experts are given":
        expected = pytest.raises(forward.UnservedError, match="its hidden states differ by")
    with torch.no_grad(), expected:
        forward.probe(policy, engine.layers, engine.device.page_size)
