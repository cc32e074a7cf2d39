"""A step through the stages of a pipeline is the step of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracles.step import LOSS_TYPES, oracle_logprobs, oracle_step
from ranks.cases import on_ranks, score_all
from ranks.test_layouts import loss_of, options, read
from scoring import check_against_oracle, write_records
from tiny import make_model, make_records, set_old_logprobs

# Layers of the model, parallel section, breadth-first micro-batches, tokens of a micro-batch.
LAYOUTS: dict[int, list[tuple[dict[str, Any], int, int]]] = {
    2: [({"pipeline": 2}, 1, 40), ({"pipeline": 2, "stages_per_rank": 2}, 1, 30)],
    4: [
        ({"pipeline": 4}, 1, 40),
        ({"pipeline": 2}, 1, 24),
        ({"pipeline": 2, "data_replicate": 2}, 2, 30),
        ({"pipeline": 2, "stages_per_rank": 2, "reduce_each_micro_batch": True}, 1, 24),
        ({"pipeline": 2, "stages_per_rank": 2, "reshard_after_forward": False}, 2, 24),
    ],
}


def make_case(kind: str, loss: dict[str, Any], directory: Path) -> tuple[Path, Path, list[dict]]:
    """Ratios on both sides of both bounds, and as many layers as stages."""
    model = directory / kind
    if not model.exists():
        make_model(model, kind, num_hidden_layers=4)
    records = make_records(11, documents=13)
    level = "document" if loss["type"] == "gspo" else "label"
    bounds = (1 - loss.get("epsilon_low", 0.2), 1 + loss.get("epsilon_high", 0.2))
    set_old_logprobs(records, oracle_logprobs(model, records), level=level, bounds=bounds)
    return model, write_records(directory / f"{kind}-{loss['type']}.jsonl", records), records


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied", "gemma2"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_loss_through_every_pipeline_is_the_oracles(size: int, kind: str, tmp_path: Path) -> None:
    runs, cases = [], []
    for name in LOSS_TYPES:
        loss = loss_of(name)
        model, rollouts, records = make_case(kind, loss, tmp_path)
        oracle = oracle_step(model, records, options(model, rollouts, loss, ({}, 1, 64)))
        for number, layout in enumerate(LAYOUTS[size]):
            output = tmp_path / f"{name}-{number}"
            runs.append((options(model, rollouts, loss, layout), str(output)))
            cases.append((oracle, output))
    on_ranks(size, score_all, runs)
    for oracle, output in cases:
        scored = read(output)
        if "clipped_ratio_fraction" in scored.step:
            assert scored.step["clipped_ratio_fraction_low"] > 0 < scored.step["clipped_ratio_fraction_high"]
        check_against_oracle(scored, oracle)
