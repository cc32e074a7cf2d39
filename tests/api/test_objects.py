"""A user's own code by object: the same run as by import path. A source of one's own, over stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import truestep
from api import own_code
from api.test_callbacks import StopAfter
from doors.toy_losses import Saturating
from doors.toy_metrics import surprise
from small_runs import merged, read_lines, sort_prompts, without_times, word_model, write_lines
from tiny import make_model, make_records
from truestep import Config
from truestep.errors import TruestepError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("objects") / "model", "llama")


@pytest.mark.long
def test_objects_and_import_paths_make_the_same_run(tmp_path: Path) -> None:
    words = word_model(tmp_path / "model")
    prompts = write_lines(tmp_path / "p.jsonl", sort_prompts(4))
    objects: dict[str, Any] = {
        "loss": {"type": "custom", "function": Saturating, "options": {"sharpness": 2.0}},
        "data": {"group_size": 4, "tokens_per_microbatch": 64, "advantages": own_code.advantages},
        "sampler": {"prompts": prompts, "reward": own_code.reward, "max_new_tokens": 6},
        "evaluation": {"prompts": prompts, "reward": own_code.reward, "every": 2},
        "optimizer": {"type": "custom", "function": own_code.sgd, "learning_rate": 1e-2},
        "logging": {"custom_metrics": [surprise], "console": False},
    }
    paths: dict[str, Any] = {
        "loss": {"function": "doors.toy_losses:Saturating"},
        "data": {"advantages": "api.own_code:advantages"},
        "sampler": {"reward": "api.own_code:reward"},
        "evaluation": {"reward": "api.own_code:reward"},
        "optimizer": {"function": "api.own_code:sgd"},
        "logging": {"custom_metrics": ["doors.toy_metrics:surprise"]},
    }
    base = {"model": {"path": words, "dtype": "float32"}, "schedule": {"docs_per_step": 8, "steps": 2}}
    lines = []
    for name, over in (("objects", {}), ("paths", paths)):
        options = merged({**base, **objects, "checkpoint": {"directory": tmp_path / name}}, over)
        lines.append(without_times(truestep.train(Config(**options)).metrics()))
    assert lines[0] == lines[1] and len(lines[0]) == 2
    assert "logprob_spread" in lines[0][0]


def sourced(model: Path, run: Path, **source: Any) -> Config:
    options = {"type": "custom", "function": own_code.records, **source}
    return Config(
        model={"path": model, "dtype": "float32"},
        data={"source": options, "advantages": "none", "tokens_per_microbatch": 40},
        schedule={"docs_per_step": 4},
        optimizer={"learning_rate": 1e-2},
        checkpoint={"directory": run, "every": 2},
        logging={"console": False},
        deterministic=True,
    )


def test_a_source_of_one_s_own_is_trained_on_once_over_stops(model: Path, tmp_path: Path) -> None:
    whole = truestep.train(sourced(model, tmp_path / "whole"))
    assert whole.step == 5 and "the data ended" in whole.ended
    expected = [record["id"] for record in make_records(5, documents=20, max_length=16)]
    ledger = read_lines(tmp_path / "whole" / "ledger.jsonl")
    assert [name for line in ledger for name in line["documents"]] == expected
    parts = sourced(model, tmp_path / "parts")
    for stop in (1, 3):
        assert not truestep.train(parts, callbacks=[StopAfter(stop)]).finished
    assert truestep.train(parts).step == 5
    assert read_lines(tmp_path / "parts" / "ledger.jsonl") == ledger
    metrics = [without_times(read_lines(tmp_path / run / "metrics.jsonl")) for run in ("whole", "parts")]
    assert metrics[0] == metrics[1]


def test_its_options_are_checked_and_used(model: Path, tmp_path: Path) -> None:
    result = truestep.train(sourced(model, tmp_path / "run", options={"seed": 7, "count": 6}))
    assert result.documents_seen == 6
    with pytest.raises(
        TruestepError, match=r"data\.source\.options\.sed: records has no such option; did you mean seed"
    ):
        truestep.train(sourced(model, tmp_path / "other", options={"sed": 7}))


def test_a_record_that_is_none_is_rejected(model: Path, tmp_path: Path) -> None:
    result = truestep.train(sourced(model, tmp_path / "run", function=own_code.odd_records))
    assert result.documents_seen == 4
    reasons = [line["reason"] for line in read_lines(tmp_path / "run" / "rejected.jsonl")]
    assert reasons == [
        "a record is a mapping with the fields of a rollout, not str",
        "a record holds what JSON cannot: object",
    ]


def test_a_source_that_fails_ends_the_run_and_is_named(model: Path, tmp_path: Path) -> None:
    config = sourced(model, tmp_path / "run", function=own_code.failing_records)
    said = "data.source.function api.own_code:failing_records raised OSError: the queue is gone, at record 4"
    with pytest.raises(TruestepError, match=said):
        truestep.train(config)
