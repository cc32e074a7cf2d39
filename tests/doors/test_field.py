"""A recipe: fields of a user's own travel from files to his own loss, metrics and advantages, over every layout."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from oracles.transformer import Transformer
from small_runs import file_config, quiet_trainer, read_lines, write_lines
from tiny import make_records
from truestep.config.load import ConfigError, load_config
from truestep.config.schema import Config
from truestep.tools.score import score
from truestep.tools.verify.judge import verify
from truestep.tools.verify.layouts import Layout

FIELDS = {
    "my_weight": {"level": "label"},
    "bonus": {"level": "label", "dtype": "int64", "default": 1},
    "difficulty": {"level": "document"},
}
LAYOUTS = ("head: 7 rows a chunk", "context 2", "pipeline 2")
LOSS = {"type": "custom", "function": "doors.toy_losses:Weighed"}


def records_with_fields(documents: int = 8) -> list[dict[str, Any]]:
    """A weight of each label, for all tokens or for labels alone, a bonus of some, and one number of the document."""
    draw = random.Random(5)
    records = []
    for number, record in enumerate(make_records(3, documents=documents, max_length=16)):
        mask = record.get("loss_mask") or [int(at >= record["prompt_length"]) for at in range(len(record["input_ids"]))]
        count = sum(mask) if number % 2 else len(mask)
        own: dict[str, Any] = {"my_weight": [draw.uniform(0.5, 2.0) for _ in range(count)], "difficulty": 0.5 + number}
        if number % 3:
            own["bonus"] = [draw.randrange(4) for _ in range(count)]
        plain = {name: record[name] for name in ("id", "input_ids")}
        records.append(plain | {"loss_mask": mask, "reward": float(number), "group_id": f"g{number // 4}"} | own)
    return records


def test_they_reach_the_loss_over_every_layout(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", records_with_fields(12))
    metrics = {"custom_metrics": ["doors.toy_metrics:weights"]}
    config = file_config(
        tiny_model("llama"),
        tmp_path / "rollouts.jsonl",
        tmp_path / "run",
        loss=LOSS,
        data={"fields": FIELDS},
        logging=metrics,
    )

    def only(layout: Layout) -> bool:
        return layout.name in LAYOUTS

    verdicts = verify(config, tmp_path / "proof", documents=8, only=only)
    assert [verdict.layout.name for verdict in verdicts] == list(LAYOUTS)
    assert not [verdict.failure for verdict in verdicts if verdict.failure is not None]
    for kind in ("loss", "gradient", "metric"):
        assert max(verdict.worst[kind].value for verdict in verdicts) <= 1e-5


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_gradient_is_that_of_plain_loops(suffix: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, records = tiny_model("llama"), records_with_fields()
    rollouts = tmp_path / f"rollouts.{suffix}"
    if suffix == "jsonl":
        write_lines(rollouts, records)
    else:
        names = dict.fromkeys(name for record in records for name in record)
        pq.write_table(pa.table({name: [record.get(name) for record in records] for name in names}), rollouts)
    score(file_config(model, rollouts, tmp_path, loss=LOSS, data={"fields": FIELDS}), tmp_path / "out", gradients=True)

    oracle = Transformer(model)
    total, labels = torch.zeros((), dtype=torch.float64), 0
    for record in records:
        places = [place for place, label in enumerate(record["loss_mask"]) if label]
        labels += len(places)
        logprobs = oracle.logits(record["input_ids"]).log_softmax(-1)
        for number, place in enumerate(places):
            of_all = len(record["my_weight"]) == len(record["input_ids"])
            at = place if of_all else number
            bonus = record["bonus"][at] if "bonus" in record else 1
            weight = record["my_weight"][at] * record["difficulty"] + bonus
            total = total - weight * logprobs[place - 1, record["input_ids"][place]]
    (total / labels).backward()
    step = json.loads((tmp_path / "out" / "step.json").read_text())
    assert step["loss"] == pytest.approx(float(total.detach()) / labels, rel=1e-5)
    gradients = load_file(tmp_path / "out" / "gradients.safetensors")
    norm = sum(float(value.grad.square().sum()) for value in oracle.parameters.values()) ** 0.5
    for name, gradient in gradients.items():
        assert float((gradient.double() - oracle.parameters[name].grad).norm()) <= 1e-5 * norm, name


def test_advantages_and_masks_and_kept_rollouts_have_them(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    records = [record | {"truncated": number == 2} for number, record in enumerate(records_with_fields())]
    for record in records:
        record["logprobs"] = [-1.0] * len(record["input_ids"])
    write_lines(tmp_path / "rollouts.jsonl", records)
    data = {
        "fields": FIELDS,
        "advantages": "rollouts.own_advantages:by_difficulty",
        "group_size": 4,
        "truncated": "mask",
    }
    loss = {"type": "custom", "function": "doors.toy_losses:WeighedPolicy"}
    config = file_config(
        tiny_model("llama"),
        tmp_path / "rollouts.jsonl",
        tmp_path / "run",
        loss=loss,
        data=data,
        schedule={"docs_per_step": 8},
        logging={"custom_metrics": ["doors.toy_metrics:weights"]},
    )
    quiet_trainer(config).run()
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    expected = 0.0
    for number, record in enumerate(records):
        if number != 2:
            of_all = len(record["my_weight"]) == len(record["input_ids"])
            mask = record["loss_mask"] if of_all else [1] * len(record["my_weight"])
            expected += sum(weight for weight, label in zip(record["my_weight"], mask, strict=True) if label)
    assert line["weights"] == pytest.approx(expected, rel=1e-6)
    verdicts = verify(config, tmp_path / "proof", documents=8, only=lambda layout: layout.name == "one process")
    assert not [verdict.failure for verdict in verdicts if verdict.failure is not None]
    assert max(verdicts[0].worst[kind].value for kind in ("loss", "gradient", "advantage")) <= 1e-5
    (file,) = (tmp_path / "run" / "rollouts").glob("*.parquet")
    kept = {row["id"]: dict(row["fields"] or ()) for row in pq.read_table(file).to_pylist()}
    assert kept[records[1]["id"]]["difficulty"] == 1.5
    assert set(kept[records[1]["id"]]) == {"my_weight", "bonus", "difficulty"}


def test_what_cannot_be_declared_is_an_error_of_the_option(tmp_path: Path) -> None:
    for fields, message in (
        ("{my_weight: {}}", "data.fields.my_weight.level"),
        ("{my_weight: {level: token}}", "data.fields.my_weight.level"),
        ("{my_weight: {level: label, dtype: float16}}", "data.fields.my_weight.dtype"),
        ("{'my weight': {level: label}}", "data.fields"),
        ("{my_weight: {level: label, defualt: 1}}", "data.fields.my_weight"),
    ):
        file = tmp_path / "run.yaml"
        file.write_text(f"model: {{path: m}}\ndata: {{path: a, fields: {fields}}}\nloss: {{type: cross_entropy}}\n")
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert message in str(caught.value)
        assert f"{file}:2" in str(caught.value)


def test_a_sampler_makes_none(tmp_path: Path) -> None:
    options = {
        "model": {"path": "m"},
        "data": {"group_size": 4, "fields": FIELDS},
        "schedule": {"steps": 1, "docs_per_step": 4},
        "sampler": {"prompts": "p.jsonl", "reward": "plain_rewards:digit_reward"},
        "checkpoint": {"directory": str(tmp_path)},
    }
    with pytest.raises(ValueError, match=r"data\.fields is for the records of data\.path and data\.source"):
        Config.model_validate(options)
