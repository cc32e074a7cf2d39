"""The vocabulary over 2 and 4 ranks gives the one-rank result: every statistic and gradient, for every loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from losses.label_cases import LOSSES

WORKER = Path(__file__).parent / "vocab_parallel_worker.py"


@pytest.mark.parametrize("world", [2, 4])
def test_every_loss_over_a_sharded_vocabulary(world: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outcomes = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (output, errors) in zip(ranks, outcomes, strict=True):
        assert rank.returncode == 0, errors[-2000:]
        assert output.splitlines()[-1] == f"checked {len(LOSSES) * 4}"
