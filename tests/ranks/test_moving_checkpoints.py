"""A run that moves: replicas of shards, then one rank, tensor, context and pipeline ranks, held to the law."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import latest, read_states, read_weights
from model.test_hybrids import FAMILIES, make_hybrid
from ranks.cases import on_ranks, train_all
from ranks.test_train_over_ranks import config
from selection import in_tiers
from small_runs import read_lines, write_rollouts
from truestep.run.checkpoint.store import CheckpointStore

Model = Callable[[str], Path]

OPTIMIZERS = {
    "adamw": {"type": "adamw"},
    "eight": {"type": "adamw_8bit", "offload": "states"},
    "muon": {"type": "muon", "offload": "all"},
}


CASES = [("adamw", "qwen3_tied"), ("eight", "qwen3_tied"), ("muon", "qwen3_tied"), ("adamw", "qwen3_5_text")]


@pytest.mark.parametrize(("name", "kind"), in_tiers(CASES, CASES[:1], [CASES[1], CASES[3]]))
def test_from_four_ranks_to_one_to_tensor_and_to_pipeline(
    name: str, kind: str, tiny_model: Model, tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 56)
    model = make_hybrid(tmp_path / "model", kind) if kind in FAMILIES else tiny_model(kind)
    optimizer = OPTIMIZERS[name]

    def given(run: str, steps: int, **parallel: int) -> dict[str, Any]:
        sections = {"optimizer": optimizer, "parallel": parallel, "schedule": {"steps": steps}}
        return config(model, tmp_path / "rollouts.jsonl", tmp_path / run, **sections)

    on_ranks(4, train_all, [given("moved", 2)])
    parts = sorted((latest(tmp_path / "moved") / "truestep").glob("part-*"))
    sizes = [file.stat().st_size for file in parts]
    assert len(parts) == 4 and max(sizes) < 0.4 * sum(sizes), "each rank writes its own part"
    on_ranks(1, train_all, [given("moved", 3)])
    on_ranks(2, train_all, [given("moved", 5, tensor=2), given("moved", 6, context=2), given("moved", 7, pipeline=2)])
    on_ranks(1, train_all, [given("moved", 8), given("still", 8)])
    moved, still = tmp_path / "moved", tmp_path / "still"
    assert read_lines(moved / "ledger.jsonl") == read_lines(still / "ledger.jsonl")
    # Levels of 8 bits are chosen by the numbers: another rounding of a sum may choose the neighbour.
    most = 1e-5 if name == "adamw" else 1e-3
    theirs, mine = read_weights(latest(still)), read_weights(latest(moved))
    assert mine.keys() == theirs.keys()
    for weight, value in theirs.items():
        assert (mine[weight] - value).norm() <= most * value.norm(), weight
    states = read_states(latest(moved))
    assert {key: value.shape for key, value in states.items()} == {
        key: value.shape for key, value in read_states(latest(still)).items()
    }
    assert CheckpointStore(moved / "checkpoints", 1).latest() == moved / "checkpoints" / "step-00000008"
