"""The vocabulary over 2 and 4 ranks gives the one-rank result: every statistic and gradient, for every loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from head.vocab_parallel_worker import check_all
from losses.label_cases import LOSSES
from selection import long_except
from truestep.ranks.launch import run_ranks


@pytest.mark.parametrize("world", long_except([2, 4], 2))
def test_every_loss_over_a_sharded_vocabulary(world: int, tmp_path: Path) -> None:
    run_ranks(world, check_all, [tmp_path], timeout=280)
    assert [file.read_text() for file in sorted(tmp_path.iterdir())] == [str(len(LOSSES) * 4)] * world
