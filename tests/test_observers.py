"""Observers and the source are told of new weights, of complete checkpoints and of the end, in order and with the right
counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from small_runs import file_config, quiet_trainer, write_rollouts
from truestep.metrics.observers import Observer, Observers
from truestep.rollouts.source import FileSource
from truestep.run.trainer import Trainer, TrainingError


class Notes(Observer):
    """Writes down what it is told."""

    def __init__(self, told: list[tuple[Any, ...]]):
        self.told = told

    def started(self) -> None:
        self.told.append(("started",))

    def rollouts(self, documents: Sequence[Any]) -> None:
        self.told.append(("rollouts", len(documents)))

    def computing(self, step: int, plan: Any) -> None:
        self.told.append(("computing", step))

    def gradient(self, plan: Any, computed: Any, norm: float) -> None:
        assert computed.line()["loss"] is not None and norm > 0
        self.told.append(("gradient",))

    def updated(self, step: int, documents_seen: int) -> None:
        self.told.append(("updated", step, documents_seen))

    def trained(self, step: int, plan: Any, scores: Sequence[Any]) -> None:
        self.told.append(("trained", step))

    def step(self, line: Any) -> None:
        self.told.append(("step", line["step"]))

    def saved(self, checkpoint: Path, step: int, documents_seen: int) -> None:
        assert (checkpoint / "truestep" / "state.json").is_file()  # whole before anybody is told
        self.told.append(("saved", step, documents_seen))

    def ended(self, ended: str, finished: bool) -> None:
        self.told.append(("ended", finished))

    def close(self) -> None:
        self.told.append(("close",))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(FileSource, "checkpointed", lambda self, seen: calls.append(("source checkpointed", seen)))
    monkeypatch.setattr(FileSource, "close", lambda self, finished: calls.append(("source close", finished)))
    return calls


def observed(model: Path, tmp_path: Path, told: list[tuple[Any, ...]], **sections: Any) -> Trainer:
    write_rollouts(tmp_path / "rollouts.jsonl", 12)
    trainer = quiet_trainer(file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **sections))
    trainer.observers.add(Notes(told))
    return trainer


def test_an_observer_is_told_of_everything_in_its_turn(
    tiny_model: Callable[[str], Path], tmp_path: Path, told: list[tuple[Any, ...]]
) -> None:
    observed(tiny_model("llama"), tmp_path, told, checkpoint={"every": 2}).run()
    # This one may be complete only after the next step.
    first = [("source checkpointed", 10), ("saved", 2, 10)]
    assert told.index(("step", 2)) < told.index(first[0]) == told.index(first[1]) - 1
    of_steps = [
        [
            *(("rollouts", count), ("computing", step), ("gradient",)),
            *(("updated", step, seen), ("trained", step), ("step", step)),
        ]
        for step, count, seen in ((1, 5, 5), (2, 5, 10), (3, 2, 12))
    ]
    assert [call for call in told if call not in first] == [
        ("started",),
        *(call for calls in of_steps for call in calls),
        *(("source checkpointed", 12), ("saved", 3, 12), ("ended", True), ("close",), ("source close", True)),
    ]


def test_a_run_that_fails_is_not_finished(
    tiny_model: Callable[[str], Path], tmp_path: Path, told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truestep.step.learner.gradient_norm", lambda *_, **__: float("nan"))
    with pytest.raises(TrainingError, match="norm is nan"):
        observed(tiny_model("llama"), tmp_path, told).run()
    assert told == [("started",), ("rollouts", 5), ("computing", 1), ("close",), ("source close", False)]


def test_all_are_closed_where_one_fails() -> None:
    told: list[tuple[Any, ...]] = []

    class Fails(Observer):
        def close(self) -> None:
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        Observers([Notes(told), Fails(), Notes(told)]).close()
    assert told == [("close",), ("close",)]


def test_every_event_of_the_protocol_reaches_all() -> None:
    """A method that `Observers` forgets would be one that nobody is told of."""
    events = {name for name, value in vars(Observer).items() if callable(value) and not name.startswith("_")}
    assert events == {name for name in vars(Observers) if name in events}
