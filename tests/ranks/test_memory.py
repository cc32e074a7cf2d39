"""States in memory on two and three machines: parts of a machine that is lost come from its partner's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ranks.cases import on_ranks
from ranks.memory_cases import keep_and_lose
from ranks.test_train_over_ranks import config
from small_runs import write_rollouts

FIRST, SECOND, THIRD = (f"part-0000{number}.safetensors" for number in range(3))

CASES = [
    pytest.param(2, [], [], ["", ""], id="nothing is lost"),
    pytest.param(2, [1], [], ["", f"{FIRST} {SECOND}"], id="a machine is lost"),
    pytest.param(2, [0, 1], [], [], id="both are lost", marks=pytest.mark.long),
    pytest.param(2, [], [0], [FIRST, ""], id="one copy is damaged"),
    pytest.param(2, [], [0, 1], [], id="both copies are damaged", marks=pytest.mark.long),
    pytest.param(2, [1], [0], [], id="the copy that is left is damaged", marks=pytest.mark.long),
    # The first machine's keeper has its own part and that of the third; and so on.
    pytest.param(3, [1], [], [SECOND, f"{FIRST} {SECOND} {THIRD}", FIRST], id="three machines", marks=pytest.mark.long),
    # The third machine has no copy of the manifest, and the only one of its part.
    pytest.param(3, [0], [2], [], id="the only copy, far from the manifest, is damaged", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("size", "lost", "harmed", "expected"), CASES)
def test_what_is_recalled_after_a_loss(
    size: int,
    lost: list[int],
    harmed: list[int],
    expected: list[str],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 49)
    given = config(
        tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run",
        schedule={"steps": 3}, checkpoint={"every": 1, "keep": 9},
    )  # fmt: skip
    on_ranks(size, keep_and_lose, given, lost, harmed, expected, THIRD if size == 3 else FIRST)


HSDP = [
    pytest.param(2, {"data_shard": 1, "data_replicate": 2}, "none", id="replicas"),
    pytest.param(4, {"data_shard": 2, "data_replicate": 2}, "none", id="sharded replicas", marks=pytest.mark.long),
    pytest.param(2, {"data_shard": 2}, "states", id="states on the host", marks=pytest.mark.long),
    pytest.param(2, {"data_shard": 2}, "all", id="weights on the host", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("size", "parallel", "offload"), HSDP)
def test_what_replicas_and_offloaded_states_recall(
    size: int, parallel: dict[str, int], offload: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A machine is lost: its part, and what it held of another, come from the copies."""
    write_rollouts(tmp_path / "rollouts.jsonl", 49)
    given = config(
        tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run",
        schedule={"steps": 3}, checkpoint={"every": 1, "keep": 9}, parallel=parallel,
        optimizer={"offload": offload},
    )  # fmt: skip
    parts = [f"part-0000{number}.safetensors" for number in range(size)]
    # Each machine holds its own part and that of the one before it.
    held = [{parts[rank], parts[rank - 1]} if rank != 1 else set() for rank in range(size)]
    on_ranks(size, keep_and_lose, given, [1], [], [" ".join(sorted({*parts} - each)) for each in held], FIRST)
