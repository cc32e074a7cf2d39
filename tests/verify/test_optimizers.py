"""`verify` runs every optimizer in float64, and finds one whose numbers depend on how weights are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selection import in_tiers
from small_runs import file_config, write_rollouts
from truestep.step.update.optimizers import by_weight, conveyor, eight_bits
from truestep.step.update.optimizers.exchange import WholeMatrices
from truestep.tools.verify.judge import LayoutResult, verify
from truestep.tools.verify.report import complaints
from truestep.weights.blocks import ScaleBlocks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw", "weight_decay": 0.1},
    "adamw_8bit": {"type": "adamw_8bit", "weight_decay": 0.1, "beta2": 0.95},
    "muon": {"type": "muon", "weight_decay": 0.1},
    "muon_original": {"type": "muon", "adjust": "original", "nesterov": False, "ns_steps": 3, "momentum": 0.5},
}
NAMES = {"one process", "FSDP 2", "tensor 2", "data 2 x tensor 2", "HSDP 2 x 2", "context 2", "pipeline 2"}
SOME = {"one process", "FSDP 2", "tensor 2"}


def judge(
    model: Path, folder: Path, optimizer: dict[str, Any], names: set[str], plant: Callable[[], None] | None = None
) -> list[LayoutResult]:
    write_rollouts(folder / "rollouts.jsonl", 12)
    optimizer = {"learning_rate": 1e-2, "gradient_clip": 0.5, **optimizer}
    schedule = {"updates_per_batch": 2}
    config = file_config(model, folder / "rollouts.jsonl", folder / "run", optimizer=optimizer, schedule=schedule)
    return verify(config, folder / "out", only=lambda layout: layout.name in names, plant=plant)


IN_LONG = [("adamw_8bit", "states"), ("adamw", "all"), ("muon", "all"), ("muon_original", "none")]
OTHERS = [("adamw", "none"), ("adamw", "states"), ("adamw_8bit", "none"), ("adamw_8bit", "all"), ("muon", "none")]


@pytest.mark.parametrize(("kind", "offload"), in_tiers([*IN_LONG, *OTHERS], [], IN_LONG))
def test_each_passes(kind: str, offload: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    names = NAMES if (kind, offload) in [("adamw_8bit", "none"), ("muon", "all")] else SOME
    verdicts = judge(tiny_model("qwen3_tied"), tmp_path, OPTIMIZERS[kind] | {"offload": offload}, names)
    assert {verdict.layout.name for verdict in verdicts} == names
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]
    assert all("update" in verdict.worst for verdict in verdicts)


def parts_alone() -> None:
    """Orthogonalise what each rank has of a matrix."""
    WholeMatrices.each = lambda self, names, part_of, work: [work(part_of(name)) for name in names]  # type: ignore[method-assign]


def blocks_of_the_part() -> None:
    """Divide a row as if a rank's part of it were all."""
    widths: dict[str, int] = {}
    honest = eight_bits.AdamW8Bit.begin

    def begin(self: Any, name: str, part: torch.Tensor) -> Any:
        widths[name] = part.shape[-1]
        return honest(self, name, part)

    eight_bits.AdamW8Bit.begin = begin  # type: ignore[method-assign]
    eight_bits.AdamW8Bit._blocks = lambda self, name: ScaleBlocks.of(widths[name])  # type: ignore[method-assign]


def turns_of_the_part() -> None:
    """Count rows from where a rank's part begins."""

    def places(self: Any, slot: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(slot.weight[..., 0].numel()), torch.arange(slot.weight.shape[-1])

    eight_bits.AdamW8Bit._places = places  # type: ignore[method-assign]


def states_that_stay() -> None:
    """Forget to put states back on the host."""
    conveyor.Here.send = lambda self, host, copies: None  # type: ignore[method-assign]


def moments_that_begin_anew() -> None:
    honest = by_weight.ByWeight.prepare

    def prepare(self: Any) -> None:
        self.state.clear()
        honest(self)

    by_weight.ByWeight.prepare = prepare  # type: ignore[method-assign]


ANEW = [
    (kind, moments_that_begin_anew, "one process", {}, "bias correction by update 1, not 2")
    for kind in ("adamw", "adamw_8bit", "muon")
]
FAULTS = [
    ("muon", parts_alone, "FSDP 2", {}, "update is no multiple"),
    ("adamw_8bit", blocks_of_the_part, "tensor 2", {}, "moment exp_avg"),
    ("adamw", states_that_stay, "one process", {"offload": "states"}, "moment is that of before the update"),
    ("adamw_8bit", turns_of_the_part, "FSDP 2", {}, "moment exp_avg"),
    ANEW[0],
]
MORE_FAULTS = [*ANEW[1:], ("muon", parts_alone, "tensor 2", {}, "update is no multiple")]


@pytest.mark.parametrize(
    ("kind", "plant", "layout", "over", "named"),
    in_tiers([*FAULTS, *MORE_FAULTS], [], FAULTS),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_found_and_named(
    kind: str,
    plant: Callable[[], None],
    layout: str,
    over: dict[str, Any],
    named: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    (verdict,) = judge(tiny_model("qwen3"), tmp_path, OPTIMIZERS[kind] | over, {layout}, plant)
    assert verdict.failure is None, verdict.failure
    assert any(line.startswith(named) for line in complaints(verdict)), complaints(verdict)
