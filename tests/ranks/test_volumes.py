"""What `plan` says that ranks send in a step is what they send, counted in the collectives of small steps."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ranks.cases import on_ranks
from ranks.counting import count_step
from scoring import write_records
from selection import long_except
from small_runs import merged
from tiny import expert_model, make_model, make_records
from truestep.config.schema import Config
from truestep.plan.advice import layout_of
from truestep.plan.cost import Work, exchanges
from truestep.plan.shape import read_shape

GROUPS = {"data_shard": "shard", "data_replicate": "replicate", "tensor": "tensor", "context": "context"}
LAYOUTS: dict[str, tuple[int, dict[str, int], float]] = {
    "shards": (2, {}, 0.03),
    "more shards": (4, {}, 0.03),
    "replicas": (2, {"data_shard": 1, "data_replicate": 2}, 0.03),
    "shards and replicas": (4, {"data_shard": 2, "data_replicate": 2}, 0.03),
    "tensor": (2, {"tensor": 2}, 0.03),
    "tensor and shards": (4, {"tensor": 2}, 0.03),
    "context": (2, {"context": 2}, 0.03),
    "pipeline": (2, {"pipeline": 2}, 0.03),
    "longer pipeline": (4, {"pipeline": 4}, 0.03),
    # Which experts tokens choose is drawn, and the plan assumes that they choose evenly.
    "experts": (2, {"expert": 2}, 0.25),
    "more experts": (4, {"expert": 4}, 0.25),
}


def planned(config: Config, size: int, step: dict[str, int]) -> dict[str, float]:
    shape, layout = read_shape(config), layout_of(config, size)
    work = Work(step["num_tokens"], step["num_labels"], 20)
    found: dict[str, float] = defaultdict(float)
    for volume in exchanges(config, shape, layout, work):
        found[GROUPS.get(volume.axes[0], volume.axes[0])] += volume.sent
    return dict(found)


def counted(folder: Path, size: int) -> tuple[dict[str, float], dict[str, int]]:
    """The most that a rank sent, by groups; the wires of a pipeline together."""
    most: dict[str, float] = defaultdict(float)
    for rank in range(size):
        told = json.loads((folder / f"sent-{rank}.json").read_text())
        groups: dict[str, float] = defaultdict(float)
        for name, sent in told["bytes"].items():
            groups["pipeline" if name.split()[0] in ("forward", "backward") else name] += sent
        for name, sent in groups.items():
            most[name] = max(most[name], sent)
    return {name: sent for name, sent in most.items() if sent}, told["step"]


OPTIONS: dict[str, dict[str, Any]] = {
    "recomputed": {"model": {"activation_checkpointing": "full"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "adapter": {"adapter": {"rank": 4, "alpha": 8}},
}


@pytest.mark.long
@pytest.mark.parametrize("layout", ["shards", "tensor"])
@pytest.mark.parametrize("what", OPTIONS)
def test_options_of_the_model_are_planned(what: str, layout: str, tmp_path: Path) -> None:
    # Over tensor ranks the plan counts a little more than is sent: all that a layer recomputes, and all of an adapter.
    check(layout, OPTIONS[what], tmp_path, least=0.0 if layout == "shards" or what == "bfloat16" else 0.08)


@pytest.mark.parametrize("layout", long_except(LAYOUTS, "shards"))
def test_planned_volumes_are_those_that_are_counted(layout: str, tmp_path: Path) -> None:
    check(layout, {}, tmp_path)


def check(layout: str, options: dict[str, Any], tmp_path: Path, least: float = 0.0) -> None:
    size, parallel, tolerance = LAYOUTS[layout]
    tolerance = max(tolerance, least)
    make = expert_model if "experts" in layout else lambda folder: make_model(folder, "qwen3", num_hidden_layers=4)
    model = make(tmp_path / "model")
    write_records(tmp_path / "r.jsonl", make_records(3, documents=24, max_length=40))
    given: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(tmp_path / "r.jsonl"), "advantages": "none", "tokens_per_microbatch": 100},
        "parallel": parallel,
    }
    given = merged(given, options)
    on_ranks(size, count_step, given, str(tmp_path))
    found, step = counted(tmp_path, size)
    expected = planned(Config.model_validate(given), size, step)
    assert found.keys() == expected.keys()
    for name, sent in expected.items():
        assert found[name] == pytest.approx(sent, rel=tolerance), name
