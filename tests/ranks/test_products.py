"""Any product of data, context, tensor and pipeline ranks is the step of one process, by the float64 oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracles.step import oracle_step
from ranks.cases import on_ranks, score_all
from ranks.test_layouts import Model, loss_of, losses_for, make_case, options, read
from scoring import check_against_oracle

# parallel section, breadth-first micro-batches, tokens of a micro-batch
OF_FOUR: list[tuple[dict[str, Any], int, int]] = [
    ({"context": 2}, 1, 40),
    ({"tensor": 2}, 2, 40),
    ({"pipeline": 2}, 1, 30),
    ({"context": 2, "tensor": 2}, 1, 40),
    ({"context": 2, "pipeline": 2}, 2, 30),
    ({"tensor": 2, "pipeline": 2}, 1, 30),
]
OF_EIGHT: list[tuple[dict[str, Any], int, int]] = [
    ({"data_replicate": 2, "context": 2, "tensor": 2}, 1, 40),
    ({"tensor": 2, "pipeline": 2}, 2, 30),
    ({"context": 2, "tensor": 2, "pipeline": 2}, 1, 30),
    ({"context": 4, "pipeline": 2}, 1, 30),
    ({"tensor": 4, "pipeline": 2}, 1, 30),
    ({"data_replicate": 2, "context": 2, "reduce_each_micro_batch": True}, 1, 24),
]


@pytest.mark.parametrize("kind", ["llama"])
def test_every_loss_under_every_product_of_four_ranks(kind: str, tiny_model: Model, tmp_path: Path) -> None:
    check(4, kind, OF_FOUR, tiny_model, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "qwen3_tied", "gemma2"])
def test_every_loss_under_products_of_eight_ranks(kind: str, tiny_model: Model, tmp_path: Path) -> None:
    check(8, kind, OF_EIGHT, tiny_model, tmp_path)


def check(
    size: int, kind: str, layouts: list[tuple[dict[str, Any], int, int]], tiny_model: Model, directory: Path
) -> None:
    runs, cases = [], []
    for name in losses_for(kind):
        loss = loss_of(name)
        model, rollouts, records = make_case(kind, loss, tiny_model, directory)
        oracle = oracle_step(model, records, options(model, rollouts, loss, ({}, 1, 64)))
        for number, layout in enumerate(layouts):
            output = directory / f"{name}-{number}"
            runs.append((options(model, rollouts, loss, layout), str(output)))
            cases.append((oracle, output))
    on_ranks(size, score_all, runs, timeout=250.0)
    for oracle, output in cases:
        scored = read(output)
        if "clipped_ratio_fraction" in scored.step:
            assert scored.step["clipped_ratio_fraction_low"] > 0 < scored.step["clipped_ratio_fraction_high"]
        check_against_oracle(scored, oracle)
