"""Callbacks: when they are called, what they may change, and what a run that goes on has of it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import truestep
from checkpoints import latest, read_weights
from ranks.cases import on_ranks
from small_runs import file_config, read_lines, sampled_config, sort_prompts, without_times, word_model, write_lines
from small_runs import write_rollouts as write
from tiny import make_model
from truestep import Callback, CallbackError, Rollout, Run, TruestepError
from truestep.config.schema import Config
from truestep.run.checkpoint.store import CheckpointStore


class Journal(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_start(self, run: Run) -> None:
        self.heard.append(f"start {run.step} {run.documents_seen}")

    def on_rollouts(self, run: Run, rollouts: Sequence[Rollout]) -> None:
        self.heard.append(f"rollouts {run.step} {len(rollouts)}")

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        assert metrics["step"] == run.step and metrics["documents_seen"] == run.documents_seen
        self.heard.append(f"step {run.step}")

    def on_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        self.heard.append(f"evaluation {evaluation['step']}")

    def on_checkpoint(self, run: Run, checkpoint: Path) -> None:
        assert (checkpoint / "truestep" / "checksums.json").is_file()
        self.heard.append(f"checkpoint {checkpoint.name[-2:]}")

    def on_end(self, run: Run, ended: str) -> None:
        self.heard.append(f"end: {ended}")


class Halve(Callback):
    """Halves the learning rate after every second step, and counts how often."""

    def __init__(self) -> None:
        self.halved = 0

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.step % 2 == 0:
            run.multiply_learning_rate(0.5)
            self.halved += 1

    def state(self) -> Any:
        return {"halved": self.halved}

    def restore(self, state: Any) -> None:
        self.halved = state["halved"]


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        if run.step == self.step:
            run.stop("the reward is good enough")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("callbacks") / "model", "llama")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    return given(model, tmp_path, "run")


def given(model: Path, folder: Path, run: str, **sections: Any) -> Config:
    write(folder / "r.jsonl", 30)
    base: dict[str, Any] = {"checkpoint": {"every": 3}, "schedule": {"steps": 6}, "deterministic": True}
    return file_config(model, folder / "r.jsonl", folder / run, **{**base, **sections})


def test_each_is_called_in_its_turn(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", sort_prompts(4))
    evaluation = {"prompts": str(prompts), "every": 2, "max_prompts": 1}
    config = sampled_config(
        word_model(tmp_path / "model"), prompts, tmp_path / "run", evaluation=evaluation, checkpoint={"every": 2}
    )
    journal = Journal()
    result = truestep.train(config, callbacks=[journal])
    assert journal.heard == [
        *("start 0 0", "evaluation 0", "rollouts 0 8", "step 1", "rollouts 1 8", "step 2", "evaluation 2"),
        *("checkpoint 02", "rollouts 2 8", "step 3", "evaluation 3", "checkpoint 03", "end: all 3 steps are done"),
    ]
    assert result.finished and result.step == 3 and result.documents_seen == 24
    assert result.ended == "all 3 steps are done" and result.directory == tmp_path / "run"
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000003"
    assert [line["step"] for line in result.metrics()] == [1, 2, 3]
    assert [line["step"] for line in result.evaluations()] == [0, 2, 3]


def test_a_callback_stops_a_run_and_the_run_goes_on(config: Config, tmp_path: Path, model: Path) -> None:
    stopped = truestep.train(config, callbacks=[StopAfter(2)])
    assert not stopped.finished and stopped.step == 2
    assert stopped.ended == (
        "stopped by a callback (the reward is good enough) after step 2; the same command goes on from here"
    )
    journal = Journal()
    assert truestep.train(config, callbacks=[journal]).finished
    assert journal.heard[:2] == ["start 2 10", "rollouts 2 5"]
    whole = given(model, tmp_path, "whole")
    truestep.train(whole)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        lines = [without_times(read_lines(tmp_path / run / name)) for run in ("run", "whole")]
        assert lines[0] == lines[1]


def weights(run: Path) -> dict[str, Any]:
    return read_weights(latest(run))


def test_the_learning_rate_is_multiplied_and_a_run_that_goes_on_has_it(model: Path, tmp_path: Path) -> None:
    """Bit for bit the run that was not stopped, at whatever step it was."""
    schedule = {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 2}
    halve = Halve()
    truestep.train(given(model, tmp_path, "whole", optimizer=schedule), callbacks=[halve])
    rates = [line["learning_rate"] for line in read_lines(tmp_path / "whole" / "metrics.jsonl")]
    plain = given(model, tmp_path, "plain", optimizer=schedule)
    truestep.train(plain)
    without = [line["learning_rate"] for line in read_lines(tmp_path / "plain" / "metrics.jsonl")]
    assert rates == [rate * factor for rate, factor in zip(without, (1, 1, 0.5, 0.5, 0.25, 0.25), strict=True)]
    assert halve.halved == 3
    for stop in (2, 3, 5):
        parts = given(model, tmp_path, f"stopped-{stop}", optimizer=schedule)
        truestep.train(parts, callbacks=[Halve(), StopAfter(stop)])
        again = Halve()
        result = truestep.train(parts, callbacks=[StopAfter(9), again])
        assert result.step == 6 and again.halved == 3
        assert [line["learning_rate"] for line in result.metrics()] == rates
        for name, weight in weights(tmp_path / "whole").items():
            assert weight.equal(weights(result.directory)[name]), (stop, name)


def test_a_factor_of_one_leaves_no_trace(config: Config) -> None:
    truestep.train(config, callbacks=[Journal()])
    assert config.checkpoint.directory is not None
    latest = CheckpointStore(Path(config.checkpoint.directory) / "checkpoints", 1).latest()
    assert latest is not None and "callbacks" not in (latest / "truestep" / "state.json").read_text(encoding="utf-8")


class Wrong(Callback):
    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        _ = metrics["rewrad"]


class Negative(Callback):
    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        run.multiply_learning_rate(-1.0)


class Unkept(Callback):
    def state(self) -> Any:
        return {"value": object()}


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (Wrong(), "Wrong.on_step, after step 1: raised KeyError: 'rewrad'"),
        (Negative(), "Negative.on_step, after step 1: the learning rate cannot be multiplied by -1.0"),
        (Unkept(), "Unkept.state, after step 3: raised TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_callback_that_fails_ends_the_run_and_is_named(callback: Callback, said: str, config: Config) -> None:
    with pytest.raises(CallbackError) as caught:
        truestep.train(config, callbacks=[callback])
    assert str(caught.value) == said
    if isinstance(callback, Wrong):
        assert isinstance(caught.value.__cause__, KeyError)  # with its traceback
    assert truestep.train(config).step == 6  # the directory was left unlocked


def test_a_run_of_python_needs_a_directory(config: Config) -> None:
    with pytest.raises(TruestepError, match=r"checkpoint\.directory is required"):
        truestep.train(config.changed({"checkpoint.directory": None}))


class Kept:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, line: Mapping[str, Any]) -> None:
        self.lines.append(f"step {line['step']}")

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self.lines.append("evaluation")

    def close(self) -> None:
        self.lines.append("close")


def test_a_sink_by_object_and_by_import_path(config: Config) -> None:
    sink = Kept()
    said = io.StringIO()
    with_path = config.changed({"logging.custom_sinks": ["api.own_code:Sink"], "logging.console": True})
    result = truestep.train(with_path, sinks=[sink], console=Console(file=said, width=200))
    assert sink.lines == [*(f"step {number}" for number in range(1, 7)), "close"]
    assert (result.directory / "own.txt").read_text(encoding="utf-8").splitlines() == ["begin 0", *sink.lines]
    assert "all 6 steps are done" in said.getvalue()


def run_with_callbacks(options: dict[str, Any]) -> None:
    truestep.train(Config.model_validate(options), callbacks=[Halve(), StopAfter(4)])


def test_all_ranks_do_what_the_first_one_s_callbacks_ask(model: Path, tmp_path: Path) -> None:
    alone, several = (given(model, tmp_path, run) for run in ("alone", "several"))
    truestep.train(alone, callbacks=[Halve(), StopAfter(4)])
    on_ranks(2, run_with_callbacks, several.model_dump())
    told = [read_lines(tmp_path / run / "metrics.jsonl") for run in ("alone", "several")]
    rates = [[line["learning_rate"] for line in lines] for lines in told]
    assert rates[0] == rates[1] == [1e-2, 1e-2, 5e-3, 5e-3]
    for name, weight in weights(tmp_path / "alone").items():
        assert (weights(tmp_path / "several")[name] - weight).norm() / weight.norm() < 1e-5
