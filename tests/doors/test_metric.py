"""A recipe: a metric of a new kind, added from outside `src`. docs/architecture.md, How to add."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small_runs import file_config, quiet_trainer, read_lines, write_rollouts
from truestep.config.custom import CustomError
from truestep.config.schema import Config
from truestep.report.page import write_report
from truestep.tools.score import score
from truestep.tools.verify.judge import verify

LAYOUTS = ("smallest micro-batches", "FSDP 2")


def config_with(metric: str, model: Path, tmp_path: Path, **sections: Any) -> Config:
    write_rollouts(tmp_path / "rollouts.jsonl", 10)
    logging = {"custom_metrics": [f"doors.toy_metrics:{metric}"]}
    return file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", logging=logging, **sections)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def test_it_is_logged_and_charted_by_train(model: Path, tmp_path: Path) -> None:
    quiet_trainer(config_with("surprise", model, tmp_path)).run()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["logprob_spread"] > 0 for line in lines)
    assert all(line["positive_labels"] <= line["num_labels"] for line in lines)
    page = tmp_path / "report.html"
    write_report([tmp_path / "run"], page)
    assert "logprob_spread" in page.read_text(encoding="utf-8")


def test_score_reduces_it_over_micro_batches(model: Path, tmp_path: Path) -> None:
    score(config_with("surprise", model, tmp_path), tmp_path / "out", gradients=False)
    step = json.loads((tmp_path / "out" / "step.json").read_text())
    logprobs = [value for line in read_lines(tmp_path / "out" / "scores.jsonl") for value in line["logprobs"]]
    assert step["num_micro_batches"] > 1
    assert step["logprob_spread"] == pytest.approx(statistics.pstdev(logprobs), rel=1e-6)


@pytest.mark.parametrize(("metric", "holds"), [("surprise", True), ("planted_count", False)])
def test_verify_holds_it_to_the_law(model: Path, tmp_path: Path, metric: str, holds: bool) -> None:
    config = config_with(metric, model, tmp_path)
    verdicts = verify(config, tmp_path / "proof", documents=16, only=lambda layout: layout.name in LAYOUTS)
    assert [verdict.failure for verdict in verdicts] == [None] * len(LAYOUTS)
    worst = max((verdict.worst["metric"] for verdict in verdicts), key=lambda found: found.value)
    assert (worst.value <= 1e-5) is holds
    assert holds or worst.name == "micro_batches_seen"


def test_a_name_that_is_taken_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CustomError, match="toy_metrics:clash gives loss, which is the name of another metric"):
        quiet_trainer(config_with("clash", model, tmp_path)).run()
