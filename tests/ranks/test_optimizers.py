"""Built-in optimizers over ranks, and from one layout to another, against torch's own in float64 on whole weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import _muon  # its class is public, and the iteration that is replaced below is not

from ranks.cases import on_ranks
from ranks.updates import RATES, Tensors, gradient_of, options_of, update_all
from selection import in_tiers
from truestep.model.loading.load import load_policy
from truestep.step.update.optimizer import OptimizerError

ENDS = ("model.embed_tokens.weight", "lm_head.weight")
DECAY = 0.1


def exact_iteration(gradient: torch.Tensor, coefficients: Any, steps: int, epsilon: float) -> torch.Tensor:
    """Newton and Schulz's, in float64: torch rounds it to bfloat16."""
    assert coefficients == (3.4445, -4.7750, 2.0315)
    assert gradient.dtype == torch.float64
    tall = gradient.shape[0] > gradient.shape[1]
    result = gradient.T if tall else gradient
    result = result / result.norm().clamp(min=epsilon)
    a, b, c = coefficients
    for _ in range(steps):
        squared = result @ result.T
        result = a * result + (b * squared + c * squared @ squared) @ result
    return result.T if tall else result


def by_torch(weights: Tensors, kind: str) -> Tensors:
    """Make 20 steps by torch's single-tensor optimizers."""
    named = {name: torch.nn.Parameter(weight.double().clone()) for name, weight in weights.items()}
    inner = [name for name, weight in named.items() if kind == "muon" and weight.ndim == 2 and name not in ENDS]
    rest = [name for name in named if name not in inner]
    groups = [
        {"params": [named[name] for name in rest if named[name].ndim >= 2], "weight_decay": DECAY},
        {"params": [named[name] for name in rest if named[name].ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.0, foreach=False, fused=False)]
    if inner:
        options: dict[str, Any] = {"weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon([named[name] for name in inner], lr=0.0, **options))
    for step, rate in enumerate(RATES):
        for name, parameter in named.items():
            parameter.grad = gradient_of(name, parameter.shape, step).double()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


Move = tuple[dict[str, int], int]  # a layout, and its ranks
MOVES: dict[str, tuple[Move, Move]] = {
    "1 to 1": (({}, 1), ({}, 1)),
    "shards 2 to 1": (({}, 2), ({}, 1)),
    "tensor 2 to shards 2": (({"tensor": 2, "data_shard": 1}, 2), ({}, 2)),
    "tensor 2 x shards 2 to pipeline 2": (({"tensor": 2}, 4), ({"pipeline": 2, "data_shard": 1}, 2)),
    "replicas 2 x shards 2 to shards 4": (({"data_replicate": 2}, 4), ({}, 4)),
    "replicas 4 to pipeline 2 x tensor 2": (({"data_replicate": 4}, 4), ({"pipeline": 2, "tensor": 2}, 4)),
    "context 2 to replicas 2 x tensor 2": (({"context": 2}, 2), ({"data_replicate": 2, "tensor": 2}, 4)),
}
IN_SHORT = [
    ("adamw", "tensor 2 x shards 2 to pipeline 2"),
    ("muon", "tensor 2 x shards 2 to pipeline 2"),
    ("adamw_8bit", "tensor 2 to shards 2"),
]
OTHERS = [(k, m) for k in ("adamw", "muon", "adamw_8bit") for m in MOVES if (k, m) not in IN_SHORT and m != "1 to 1"]


def moved(model: Path, folder: Path, optimizer: dict[str, Any], move: str) -> dict[str, Tensors]:
    """Make ten steps on a layout and ten more on another, and give what is there at the end."""
    (first, ranks), (second, later) = MOVES[move]
    folder.mkdir()
    given = options_of(model, {"weight_decay": DECAY, **optimizer})
    on_ranks(ranks, update_all, [(given, first, 0, 10, str(folder))])
    on_ranks(later, update_all, [(given, second, 10, 20, str(folder))])
    found: dict[str, Tensors] = torch.load(folder / "20.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def still_of(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Tensors]]:
    """Give what one process has after twenty steps of a kind of optimizer, which are made once."""
    made: dict[str, dict[str, Tensors]] = {}

    def still(kind: str) -> dict[str, Tensors]:
        if kind not in made:
            made[kind] = moved(tiny_model("qwen3"), tmp_path_factory.mktemp(kind) / "still", {"type": kind}, "1 to 1")
        return made[kind]

    return still


def start_of(model: Path) -> Tensors:
    masters = load_policy(model, dtype="float32", device="cpu").weights.master
    return {name: master.detach().clone() for name, master in masters.items()}


@pytest.mark.parametrize(("kind", "move"), in_tiers([*IN_SHORT, *OTHERS], IN_SHORT, OTHERS[::5]))
def test_twenty_steps_over_two_layouts(
    kind: str,
    move: str,
    tiny_model: Callable[[str], Path],
    still_of: Callable[[str], dict[str, Tensors]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are torch's float64 ones, and the state is that of a run of one process; in 8 bits both are."""
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", exact_iteration)
    model = tiny_model("qwen3")
    found = moved(model, tmp_path / "moved", {"type": kind}, move)
    still = still_of(kind)
    wanted = still["weights"] if kind == "adamw_8bit" else by_torch(start_of(model), kind)
    for name, value in wanted.items():
        assert (found["weights"][name].double() - value).norm() <= 1e-6 * value.norm(), name
    assert found["state"].keys() == still["state"].keys()
    for name, value in still["state"].items():
        assert found["state"][name].dtype == value.dtype and found["state"][name].shape == value.shape
        assert (found["state"][name].double() - value).norm() <= 1e-6 * value.double().norm(), name
    if kind == "adamw_8bit":
        kept = {value.dtype for name, value in found["state"].items() if "proj.weight.exp_avg" in name}
        assert kept == {torch.int8, torch.uint8, torch.float32}


OFFLOADED = [
    ("muon", "all", "tensor 2 to shards 2"),
    *((kind, "states", "1 to 1") for kind in ("adamw", "adamw_8bit")),
]
MORE_OFFLOADED = [
    (kind, offload, move)
    for kind in ("adamw", "muon", "adamw_8bit")
    for offload in ("states", "all")
    for move in MOVES
    if (kind, offload, move) not in OFFLOADED
]


@pytest.mark.parametrize(
    ("kind", "offload", "move"), in_tiers([*OFFLOADED, *MORE_OFFLOADED], OFFLOADED, MORE_OFFLOADED[9::13])
)
def test_what_lies_on_the_host_is_the_same_numbers_bit_for_bit(
    kind: str, offload: str, move: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen3_tied")
    plain, offloaded = (
        moved(model, tmp_path / place, {"type": kind, "offload": place}, move) for place in ("none", offload)
    )
    for part in ("weights", "state"):
        assert plain[part].keys() == offloaded[part].keys()
        assert all(torch.equal(plain[part][name], value) for name, value in offloaded[part].items())


def test_another_optimizers_state_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    update_all([(options_of(model, {"type": "adamw"}), {}, 0, 1, str(tmp_path))])
    message = (
        "holds another optimizer's state: .* has exp_avg, exp_avg_sq where this optimizer keeps exp_avg, exp_avg_la"
    )
    with pytest.raises(OptimizerError, match=message):
        update_all([(options_of(model, {"type": "adamw_8bit"}), {}, 1, 2, str(tmp_path))])
    with pytest.raises(OptimizerError, match="keeps momentum_buffer"):
        update_all([(options_of(model, {"type": "muon"}), {}, 1, 2, str(tmp_path))])
