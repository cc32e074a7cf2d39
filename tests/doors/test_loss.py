"""A recipe: a loss of whole documents with an option, added from outside `src`. docs/architecture.md, How to add."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracles.step import oracle_logprobs
from small_runs import file_config, quiet_trainer, read_lines, write_lines, write_rollouts
from tiny import make_records, set_old_logprobs
from truestep.config.custom import CustomError
from truestep.config.load import ConfigError, load_config
from truestep.config.schema import Config
from truestep.losses.label_losses import make_label_loss
from truestep.tools.score import score
from truestep.tools.verify.judge import verify


def custom(name: str, **options: Any) -> dict[str, Any]:
    return {"type": "custom", "function": f"doors.toy_losses:{name}", "options": options}


@pytest.fixture
def case(tiny_model: Callable[[str], Path], tmp_path: Path) -> dict[str, Any]:
    """Options of a step over rollouts with ratios away from 1."""
    model = tiny_model("llama")
    records = make_records(3, documents=12, max_length=16)
    set_old_logprobs(records, oracle_logprobs(model, records), level="document")
    write_lines(tmp_path / "rollouts.jsonl", records)
    config = file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run")
    return config.model_dump()


def test_it_trains_and_its_option_acts(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 10)
    ends = []
    for sharpness in (0.5, 0.5, 5.0):
        run = tmp_path / f"run-{len(ends)}"
        loss = custom("Saturating", sharpness=sharpness)
        trainer = quiet_trainer(file_config(tiny_model("llama"), tmp_path / "rollouts.jsonl", run, loss=loss))
        trainer.run()
        ends.append([line["loss"] for line in read_lines(run / "metrics.jsonl")])
    assert ends[0] == ends[1] != ends[2]
    assert any(ends[0])


def test_score_gives_its_loss_and_its_ratio(case: dict[str, Any], tmp_path: Path) -> None:
    config = Config.model_validate(case | {"loss": custom("Saturating", sharpness=2.0)})
    score(config, tmp_path / "out", gradients=True)
    step = json.loads((tmp_path / "out" / "step.json").read_text())
    scores = {line["id"]: line for line in read_lines(tmp_path / "out" / "scores.jsonl")}
    expected, labels = 0.0, 0
    for record in read_lines(tmp_path / "rollouts.jsonl"):
        ratios = scores[record["id"]]["ratio"]
        if not ratios:
            continue
        assert ratios == [ratios[0]] * len(ratios), "the ratio is the document's at each of its labels"
        advantage = record["advantage"]
        if isinstance(advantage, list):
            count = len(ratios)
            masked = [value for value in advantage if value is not None]
            values = (
                masked
                if len(masked) == count
                else [value for value, label in zip(advantage, record["loss_mask"], strict=True) if label]
            )
            advantage = sum(values) / count
        expected += len(ratios) * -advantage * math.tanh(2.0 * math.log(ratios[0])) / 2.0
        labels += len(ratios)
    assert step["loss"] == pytest.approx(expected / labels, rel=1e-5)
    assert step["grad_norm"] > 0


def judged(case: dict[str, Any], tmp_path: Path, loss: dict[str, Any], *names: str) -> dict[str, float]:
    """Give verify's worst difference of each kind."""
    config = Config.model_validate(case | {"loss": loss})
    verdicts = verify(config, tmp_path / "proof", documents=8, only=lambda layout: layout.name in names)
    assert [verdict.layout.name for verdict in verdicts] == list(names)
    assert all(verdict.failure is None for verdict in verdicts)
    return {kind: max(verdict.worst[kind].value for verdict in verdicts) for kind in ("loss", "gradient", "metric")}


@pytest.mark.parametrize(
    ("correction", "layouts"),
    [
        (None, ("head: 7 rows a chunk", "context 2")),
        ({"type": "mask", "level": "document", "low": 0.5, "high": 2.0}, ("smallest micro-batches",)),
    ],
    ids=["alone", "with a correction"],
)
def test_verify_proves_it_without_a_line_of_ours(
    correction: dict[str, Any] | None, layouts: tuple[str, ...], case: dict[str, Any], tmp_path: Path
) -> None:
    loss = custom("Saturating", sharpness=2.0) | ({"correction": correction} if correction else {})
    assert max(judged(case, tmp_path, loss, *layouts).values()) <= 1e-5


def test_verify_finds_a_slope_that_is_not_the_losses_own(case: dict[str, Any], tmp_path: Path) -> None:
    worst = judged(case, tmp_path, custom("WrongSlope", sharpness=2.0), "one process")
    assert worst["loss"] <= 1e-5
    assert worst["gradient"] > 1e-3


def test_a_supervised_loss_needs_no_advantage(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    records = make_records(5, documents=6, max_length=16)
    bare = [{name: record[name] for name in ("id", "input_ids", "loss_mask") if name in record} for record in records]
    write_lines(tmp_path / "rollouts.jsonl", [record for record in bare if "loss_mask" in record])
    config = file_config(tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run", loss=custom("Imitation"))
    quiet_trainer(config).run()
    assert not (tmp_path / "run" / "rejected.jsonl").exists() or not read_lines(tmp_path / "run" / "rejected.jsonl")
    assert read_lines(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("{type: custom, function: doors.toy_losses:Saturating, options: {sharpnes: 1.0}}", "did you mean sharpness?"),
        ("{type: custom, function: doors.toy_losses:Saturating, options: {sharpness: soft}}", "options.sharpness"),
        ("{type: custom, function: doors.toy_losses:Saturating}", "options.sharpness"),
        ("{type: custom, function: doors.toy_losses:Absent}", "has no class Absent"),
        ("{type: custom, function: doors.nowhere:Absent}", "No module named 'doors.nowhere'"),
        (
            "{type: custom, function: doors.toy_losses:Imitation, off_policy_mask: 0.1}",
            "off_policy_mask corrects a policy loss, and doors.toy_losses:Imitation is supervised",
        ),
        (
            "{type: custom, function: doors.toy_losses:Saturating, options: {sharpness: 1.0}, "
            "correction: {type: mask, high: 2.0}}",
            "correction.level: label gives each label a weight of its own",
        ),
        (
            "{type: custom, function: doors.toy_losses:Saturating, options: {sharpness: 1.0}, clip_cov: {}}",
            "clip_cov takes single labels out of a document",
        ),
        ("{type: custom, function: plain}", "write it as package.module:function"),
    ],
)
def test_a_loss_that_cannot_be_made_is_an_error_that_names_the_option(loss: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: m}}\ndata: {{path: a}}\nloss: {loss}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert message in str(caught.value)
    assert f"{file}:3" in str(caught.value)


def test_what_is_no_loss_is_refused_by_name(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"path": "m"}, "loss": custom("NoLoss")})
    with pytest.raises(CustomError, match=r"NoLoss does not derive from truestep\.losses\.label_losses\.LabelLoss"):
        make_label_loss(config.loss)
