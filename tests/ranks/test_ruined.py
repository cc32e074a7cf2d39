"""Weights and states that are not finite on some of two ranks: all end with one error, and nothing is saved."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpoints import latest
from ranks.cases import on_ranks
from ranks.test_train_over_ranks import config as over_ranks
from selection import long_except
from small_runs import file_hashes, merged, write_rollouts
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.ranks.axes import RankError
from truestep.run.assemble.policy import join_ranks
from truestep.run.train import make_trainer

Model = Callable[[str], Path]


def train_and_write_the_error(options: dict[str, Any], errors: str, ruined_on: int | None) -> None:
    config = Config.model_validate(options)
    ranks = join_ranks(config)
    trainer = make_trainer(config, Console(file=io.StringIO()), ranks=ranks)
    honest = trainer.directory.record_step

    def record_step(step: int, *arguments: Any) -> None:
        honest(step, *arguments)
        if step == 3 and ranks.rank == ruined_on:
            name = list(trainer.policy.weights.master)[3]
            trainer.optimizer.state[trainer.policy.weights.master[name]]["exp_avg"].view(-1)[0] = math.nan

    trainer.directory.record_step = record_step  # type: ignore[method-assign]
    try:
        trainer.run()
    except TruestepError as error:
        Path(errors, str(ranks.rank)).write_text(str(error))
        raise


@pytest.mark.parametrize("ruined_on", long_except([None, 0, 1], None))
def test_all_ranks_end_with_one_error(ruined_on: int | None, tiny_model: Model, tmp_path: Path) -> None:
    """Sharded weights ruined by the learning rate, or a state that one rank alone has."""
    write_rollouts(tmp_path / "r.jsonl", 42)
    options = over_ranks(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", schedule={"steps": 2})
    on_ranks(2, train_and_write_the_error, options, str(tmp_path), None)
    options = merged(options, {"schedule": {"steps": 4}, "checkpoint": {"every": 3, "keep": 1}})
    if ruined_on is None:
        options = merged(options, {"optimizer": {"learning_rate": 1e30}})
    good = file_hashes(latest(tmp_path / "run"))
    with pytest.raises(RankError):
        on_ranks(2, train_and_write_the_error, options, str(tmp_path), ruined_on)
    first, second = ((tmp_path / rank).read_text() for rank in "01")
    assert first == second
    assert first.startswith("step 3: its update left" if ruined_on is None else "step 3 is not saved: ")
    assert latest(tmp_path / "run").name == "step-00000002" and file_hashes(latest(tmp_path / "run")) == good
