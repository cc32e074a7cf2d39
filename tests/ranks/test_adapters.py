"""Adapters: gradients are those of the merged weights by the chain rule, on every layout; a run saves and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters import chain_rule, write_adapter, write_merged
from oracles.step import OracleResult, oracle_step
from ranks.cases import on_ranks, score_all
from scoring import loaded_once
from small_runs import file_config, merged, write_rollouts
from tiny import make_model
from truestep.config.schema import Config
from truestep.score import score

LAYOUTS: list[dict[str, Any]] = [
    {"data_shard": 2},
    {"data_shard": 1, "data_replicate": 2},
    {"context": 2},
    {"tensor": 2},
    {"pipeline": 2},
]


def config_of(tmp_path: Path, model: Path, **sections: Any) -> dict[str, Any]:
    rollouts = tmp_path / "rollouts.jsonl"
    if not rollouts.exists():
        write_rollouts(rollouts, 11)
    return file_config(model, rollouts, tmp_path / "run", **sections).model_dump(exclude_unset=True)


def oracle_of(model: Path, config: dict[str, Any]) -> OracleResult:
    records = [json.loads(line) for line in Path(config["data"]["path"]).read_text(encoding="utf-8").splitlines()]
    options = Config.model_validate(config).model_dump()
    return oracle_step(model, records, options)


def check_gradients(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "gradients.safetensors")
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name].double() - value).norm() <= 1e-5 * value.norm(), (folder.name, name)


def check_scores(folder: Path, oracle: OracleResult) -> None:
    scored = [json.loads(line) for line in (folder / "scores.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = {document["id"]: document["logprobs"] for document in oracle.documents}
    for line in scored:
        worst = max((abs(a - b) for a, b in zip(line["logprobs"], expected[line["id"]], strict=True)), default=0.0)
        assert worst <= 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "gemma2"])
def test_gradients_are_those_of_the_merged_weights_on_every_layout(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / kind, kind)
    write_adapter(tmp_path / "adapter", model)
    config = config_of(tmp_path, model, adapter={"path": str(tmp_path / "adapter")})
    oracle = oracle_of(write_merged(model, tmp_path / "adapter", tmp_path / "merged"), config)
    expected = chain_rule(oracle.gradients, tmp_path / "adapter")
    runs = [(merged(config, {"parallel": layout}), str(tmp_path / str(n))) for n, layout in enumerate(LAYOUTS)]
    with loaded_once():
        score(Config.model_validate(config), tmp_path / "one", gradients=True)
    on_ranks(2, score_all, runs)
    for folder in [tmp_path / "one", *(Path(folder) for _, folder in runs)]:
        check_gradients(folder, expected)
        check_scores(folder, oracle)
