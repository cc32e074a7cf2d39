"""Recomputation in part, and activations on the host: no number changes, and what is dear is not made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from documents import make_documents, pack_all, same_bits
from selection import in_tiers
from tiny import expert_model
from truestep.model.fast.activation_checkpointing import is_kept, is_product
from truestep.model.fast.activation_offload import ActivationOffload
from truestep.model.loading.load import load_policy

Made = Callable[[str], Path]
DOCUMENTS = make_documents([9, 1, 30, 4], seed=2)


class Attended(TorchDispatchMode):
    """Counts how often attention is computed forward."""

    times = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.name()
        self.times += "attention" in name and "backward" not in name
        return function(*arguments, **(named or {}))


IN_SHORT = [("qwen3", dtype, on_host) for dtype in ("float32", "bfloat16") for on_host in (False, True)]
IN_LONG = [("gemma2", "bfloat16", True), ("llama", "float32", False)]


@pytest.mark.parametrize(("kind", "dtype", "on_host"), in_tiers([*IN_SHORT, *IN_LONG], IN_SHORT, IN_LONG))
def test_selective_recomputation_keeps_what_is_dear_and_changes_no_bit(
    kind: str, dtype: str, on_host: bool, tiny_model: Made
) -> None:
    runs = {}
    for how in (False, "full", "selective", "elementwise"):
        policy = load_policy(
            tiny_model(kind),
            dtype=dtype,
            device="cpu",
            activation_checkpointing=how,
            offload_activations=on_host and bool(how),
        )
        with Attended() as attended:
            hidden = policy.hidden(pack_all(DOCUMENTS).tokens)
            hidden.float().square().sum().backward()
        runs[how] = (hidden.detach(), policy.weights.gradients, attended.times)
    if kind != "gemma2":  # whose softcap is computed score by score
        assert runs["selective"][2] == runs["elementwise"][2] == runs[False][2] > 0, "attention was kept"
        assert runs["full"][2] == 2 * runs[False][2]
    for how in ("full", "selective", "elementwise"):
        assert same_bits(runs[False][0], runs[how][0])
        assert all(same_bits(gradient, runs[how][1][name]) for name, gradient in runs[False][1].items())


def test_activations_on_the_host_are_those_of_every_layer(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Size] = []
    honest = ActivationOffload._send

    def told(self: Any, tensor: torch.Tensor, before: Any) -> Any:
        sent.append(tensor.shape)
        return honest(self, tensor, before)

    monkeypatch.setattr(ActivationOffload, "_send", told)
    policy = load_policy(tiny_model("qwen3"), device="cpu", activation_checkpointing="full", offload_activations=True)
    tokens = pack_all(DOCUMENTS).tokens
    for _ in range(3):
        policy.hidden(tokens).square().sum().backward()
    layers, width = policy.model.config.num_hidden_layers, policy.model.config.hidden_size
    assert set(sent) == {torch.Size((1, len(tokens), width))}
    assert len(sent) >= 3 * layers
    assert policy.activations_on_host is not None
    rooms = sum(len(free) for free in policy.activations_on_host._free.values())
    assert rooms == len(sent) // 3, "the same memory serves every micro-batch"
    with torch.no_grad():
        policy.hidden(tokens)
    assert len(sent) == 3 * rooms, "nothing is kept where there is no backward pass"


class Products(TorchDispatchMode):
    """Counts products."""

    times = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.times += is_product(function)
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("experts", [False, True])
def test_elementwise_recomputation_makes_no_product_again(experts: bool, tiny_model: Made, tmp_path: Path) -> None:
    model = expert_model(tmp_path / "model") if experts else tiny_model("qwen3")
    counted = {}
    for how in (False, "full", "elementwise"):
        policy = load_policy(model, device="cpu", activation_checkpointing=how)
        loss = policy.hidden(pack_all(DOCUMENTS).tokens).square().sum()
        with Products() as products:
            loss.backward()
        counted[how] = products.times
    assert counted["elementwise"] == counted[False] < counted["full"]


def test_products_that_change_the_width_are_made_again() -> None:
    product = torch.ops.aten.mm.default
    for weight, kept in (((64, 64), True), ((64, 128), True), ((128, 64), True), ((64, 192), False), ((64, 8), False)):
        assert is_kept(product, (torch.empty(5, weight[0]), torch.empty(weight))) is kept
    assert not is_kept(torch.ops.aten.mul.Tensor, (torch.empty(2), torch.empty(2)))
