"""SIGKILL in the middle of a save by several ranks, then a restart: bitwise the run that was never killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import latest
from ranks.cases import on_ranks, train_all
from ranks.saving import MOMENTS, OF_FIRST, train_until_killed
from ranks.test_train_over_ranks import config
from small_runs import file_hashes, read_lines, without_times, write_rollouts
from tiny import expert_model
from truestep.ranks.axes import RankError
from truestep.run.checkpoint.comparison import find_damage
from truestep.run.checkpoint.store import CheckpointStore

Model = Callable[[str], Path]

# A few for `make test`. One process that is killed at any instant: test_kill.py.
CASES = [
    pytest.param(2, {}, ["staging", "writing", "manifest"], id="two"),
    pytest.param(1, {}, [*MOMENTS], id="one", marks=pytest.mark.release),
    pytest.param(2, {"tensor": 2}, [*MOMENTS], id="tensor", marks=pytest.mark.long),
    pytest.param(2, {"expert": 2}, ["staging", "writing", "manifest"], id="expert", marks=pytest.mark.long),
    pytest.param(4, {"data_replicate": 2}, [*MOMENTS, "staging", "writing"], id="four", marks=pytest.mark.release),
    pytest.param(4, {"pipeline": 2}, [*MOMENTS], id="pipeline", marks=pytest.mark.release),
]


@pytest.mark.parametrize(("size", "parallel", "moments"), CASES)
def test_kills_in_the_middle_of_saves_change_nothing(
    size: int, parallel: dict[str, int], moments: list[str], tiny_model: Model, tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 49)
    draw = random.Random(f"{size} {parallel}")
    model = expert_model(tmp_path / "model") if "expert" in parallel else tiny_model("qwen3_tied")

    def given(name: str) -> dict[str, Any]:
        optimizer = {"type": "adamw_8bit"} if size == 2 else {"type": "muon" if size == 1 else "adamw"}
        return config(
            model, tmp_path / "rollouts.jsonl", tmp_path / name, parallel=parallel,
            optimizer=optimizer, deterministic=True, checkpoint={"every": 2, "keep": 1},
        )  # fmt: skip

    on_ranks(size, train_all, [given("whole")])
    checkpoints = CheckpointStore(tmp_path / "killed" / "checkpoints", 1)
    for moment in moments:
        rank = 0 if moment in OF_FIRST else draw.randrange(size)
        before = checkpoints.latest()
        with pytest.raises(RankError, match="-9"):
            # The second time: some of these leave one more checkpoint than there was before.
            on_ranks(size, train_until_killed, given("killed"), moment, rank, 2 if before is None else 1)
        assert all(find_damage(checkpoint) is None for checkpoint in checkpoints.complete()), moment
        assert checkpoints.latest() is not None, moment
    on_ranks(size, train_all, [given("killed")])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert latest(killed).name == latest(whole).name == "step-00000007"
    assert file_hashes(latest(killed)) == file_hashes(latest(whole))
    assert sorted(file.name for file in latest(killed).parent.iterdir()) == ["step-00000007"]
    assert (killed / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    lines = [without_times(read_lines(run / "metrics.jsonl")) for run in (killed, whole)]
    assert lines[0] == lines[1]
