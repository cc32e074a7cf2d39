"""A source is told of new weights, of complete checkpoints and of the end, in that order and with the right counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small_runs import file_config, quiet_trainer, write_rollouts
from truestep.rollouts.source import FileSource
from truestep.trainer import TrainingError


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def checkpointed(self: FileSource, path: Path, step: int, seen: int) -> None:
        assert (path / "truestep" / "state.json").is_file()  # whole before anybody is told
        calls.append(("checkpointed", step, seen))

    monkeypatch.setattr(FileSource, "updated", lambda self, seen: calls.append(("updated", seen)))
    monkeypatch.setattr(FileSource, "checkpointed", checkpointed)
    monkeypatch.setattr(FileSource, "close", lambda self, finished: calls.append(("close", finished)))
    return calls


def test_a_source_is_told(tiny_model: Callable[[str], Path], tmp_path: Path, told: list[tuple[Any, ...]]) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 12)
    config = file_config(tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run", checkpoint={"every": 2})
    quiet_trainer(config).run()
    first = ("checkpointed", 2, 10)  # it may be complete only after the next step
    assert told.index(first) > told.index(("updated", 10))
    told.remove(first)
    assert told == [("updated", 5), ("updated", 10), ("updated", 12), ("checkpointed", 3, 12), ("close", True)]


def test_a_run_that_fails_is_not_finished(
    tiny_model: Callable[[str], Path], tmp_path: Path, told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 12)
    config = file_config(tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run")
    monkeypatch.setattr("truestep.trainer.gradient_norm", lambda *_, **__: float("nan"))
    with pytest.raises(TrainingError, match="norm is nan"):
        quiet_trainer(config).run()
    assert told == [("close", False)]
