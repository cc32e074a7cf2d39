"""Where a router's scores nearly tie, rounding alone decides which experts compute. A mixture is not refused for that:
not when it is loaded in half precision, nor by the engine. Everything else is still found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import tiny_families
from truestep.generate.engine import forward
from truestep.generate.engine.engine import Engine, engine_of
from truestep.model.experts import routers
from truestep.model.experts.routing import ExpertSettings, RoutedLayer
from truestep.model.loading import load, probe
from truestep.model.loading.load import load_policy
from truestep.model.loading.same_experts import _routers_in, routes_given, routes_kept
from truestep.model.policy import Policy
from truestep.weights.errors import ModelError


def mixture(path: Path, family: str) -> None:
    """Write a tiny model whose experts decide most of its hidden states."""
    with pytest.MonkeyPatch.context() as patch:
        if family == "gemma4_text":
            own = tiny_families.OWN[family] | {"enable_moe_block": True, "top_k_experts": 2}
            patch.setitem(tiny_families.OWN, family, own)
        tiny_families.tiny_family(path, family)
    file = path / "model.safetensors"
    tensors = {
        name: value * 30 if "experts" in name and "down_proj" in name and "bias" not in name else value
        for name, value in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def others(index: torch.Tensor, experts: int) -> torch.Tensor:
    """Replace the last of a token's experts by one that it does not have."""
    free = [next(e for e in range(experts) if e not in row) for row in index.tolist()]
    return torch.cat([index[:, :-1], torch.tensor(free)[:, None]], dim=1)


@contextmanager
def changed(model: Any, when: Callable[[], bool], case: str) -> Iterator[None]:
    """Let routers choose otherwise, as other rounding would, or give other logits."""

    def change(_: Any, __: Any, result: Any) -> Any:
        logits, scores, index = result
        if not when():
            return None
        return (logits + 0.01, scores, index) if "logits" in case else (logits, scores, others(index, logits.shape[1]))

    known = [routed.router for routed in routers.routed_in(model)]
    named = [m for n, m in model.named_modules() if n.endswith((".router", ".mlp.gate"))]  # not all are known
    hooks = [router.register_forward_hook(change) for router in known or named]
    assert hooks
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h", "gemma4_text", "hunyuan_v1_moe", "afmoe"])
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *itertools.product(["float32", "bfloat16"], ["experts are given", "routers choose", "attention is wrong"]),
        ("float32", "logits are wrong"),
    ],
)
def test_a_mixture_is_loaded_whichever_experts_rounding_chooses(
    family: str, dtype: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(tmp_path, family)
    packed, is_packed = probe._packed, False

    def pack(model: Any, *given: Any) -> torch.Tensor:
        nonlocal is_packed
        is_packed = next(model.parameters()).dtype == getattr(torch, dtype)
        try:
            hidden = packed(model, *given)
            return hidden.roll(1, dims=0) if is_packed and case == "attention is wrong" else hidden
        finally:
            is_packed = False

    def probing(model: Any, *given: Any, name: str) -> Any:
        with changed(model, lambda: is_packed, case):
            return getattr(probe, name)(model, *given)

    monkeypatch.setattr(probe, "_packed", pack)
    for name in ("probe_float32", "probe_half_precision"):
        monkeypatch.setattr(load, name, partial(probing, name=name))
    if case == "routers choose":
        monkeypatch.setattr(probe, "routes_given", lambda *_: nullcontext([]))
    expected: Any = nullcontext()
    if case != "experts are given":
        half = "in half precision" if dtype == "bfloat16" else "documents"
        expected = pytest.raises(ModelError, match=f"packed {half} gives? other values")
    with expected:
        load_policy(tmp_path, dtype=dtype, device="cpu")


class Sampling:
    """Whether the engine runs the model, whose positions it may be given wrongly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, positions: int = 1):
        self.now, self._run, self._positions = False, forward.run_model, positions
        monkeypatch.setattr(forward, "run_model", self._run_model)

    def _run_model(self, policy: Policy, ids: Any, positions: Any, step: Any) -> torch.Tensor:
        self.now = True
        try:
            return self._run(policy, ids, self._positions * positions, step)
        finally:
            self.now = False


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
    sampling = Sampling(monkeypatch, positions=2 if case == "positions are wrong" else 1)
    choose = RoutedLayer.choose

    def another(self: RoutedLayer, own: torch.Tensor) -> torch.Tensor:
        return choose(self, others(own, self.experts) if sampling.now else own)

    monkeypatch.setattr(RoutedLayer, "choose", another)
    if case == "routers choose":
        hidden = Policy.hidden_alone
        monkeypatch.setattr(Policy, "hidden_alone", lambda self, tokens, routes: hidden(self, tokens))
    expected: Any = nullcontext()
    if case != "experts are given":
        expected = pytest.raises(forward.UnservedError, match="its hidden states differ by")
    with torch.no_grad(), expected:
        forward.probe(policy, engine.layers, engine.device.page_size)


@pytest.mark.parametrize("family", ["gemma4_text", "afmoe", "qwen3_moe"])
@pytest.mark.parametrize("case", ["experts are given", "routers choose"])
def test_the_engine_serves_a_mixture_whose_experts_are_not_replayed(
    family: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers of two families cannot be given experts; the third's may not."""
    mixture(tmp_path, family)
    policy = load_policy(tmp_path, dtype="float32", device="cpu", experts=ExpertSettings(replay="off"))
    sampling = Sampling(monkeypatch)
    if case == "routers choose":
        monkeypatch.setattr(forward, "routes_given", lambda *_: nullcontext([]))
    with changed(policy.model, lambda: sampling.now, case):
        engine = engine_of(policy)
    assert isinstance(engine, Engine) == (case == "experts are given"), engine
    routed = [module for _, module in _routers_in(policy.model)]
    assert all(len(module._forward_hooks) == 0 for module in routed)


@pytest.mark.parametrize(("ranks", "padding"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_ranks_that_divide_the_tokens_get_the_experts_of_theirs(ranks: int, padding: int, tmp_path: Path) -> None:
    """Padding, which comes last, gets what its routers compute."""
    mixture(tmp_path, "qwen3_moe")
    model = load_policy(tmp_path, dtype="float32", device="cpu").model
    router = next(iter(routers.routed_in(model))).router
    tokens = torch.randn(ranks * 5, router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), routes_kept(model) as routes:
        for document in tokens[: len(tokens) - padding].split(4):
            router(document)
        (name,) = routes
        right = (routes[name][0], routes[name][1] + 1, others(routes[name][2], 4))
        found = []
        for part, own in enumerate(tokens.chunk(ranks)):
            with routes_given(model, {name: right}, part) as apart:
                found.append(router(own))
            assert not apart or float(torch.cat(apart).sum()) < 1e-4
        own = router(tokens[len(tokens) - padding :])
    for mine, kept, padded in zip(map(torch.cat, zip(*found, strict=True)), right, own, strict=True):
        torch.testing.assert_close(mine, torch.cat([kept, padded]))
