"""Products of eight ranks are the step of one process, by the float64 oracle; those of four: tests/verify."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracles.step import oracle_step
from ranks.cases import on_ranks, score_all
from ranks.test_layouts import Layout, Model, loss_of, make_case, options, read
from scoring import check_against_oracle

OF_EIGHT: list[Layout] = [
    ({"data_replicate": 2, "context": 2, "tensor": 2}, 1, 40),
    ({"tensor": 2, "pipeline": 2}, 2, 30),
    ({"context": 2, "tensor": 2, "pipeline": 2}, 1, 30),
    ({"context": 4, "pipeline": 2}, 1, 30),
    ({"tensor": 4, "pipeline": 2}, 1, 30),
    ({"data_replicate": 2, "context": 2, "reduce_each_micro_batch": True}, 1, 24),
]


@pytest.mark.release
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_products_of_eight_ranks(kind: str, tiny_model: Model, tmp_path: Path) -> None:
    """A loss of labels and one of whole documents."""
    runs, cases = [], []
    for name in ("grpo", "gspo"):
        loss = loss_of(name)
        model, rollouts, records = make_case(kind, loss, tiny_model, tmp_path)
        oracle = oracle_step(model, records, options(model, rollouts, loss, ({}, 1, 64)))
        for number, layout in enumerate(OF_EIGHT):
            output = tmp_path / f"{name}-{number}"
            runs.append((options(model, rollouts, loss, layout), str(output)))
            cases.append((oracle, output))
    on_ranks(8, score_all, runs)
    for oracle, output in cases:
        scored = read(output)
        assert scored.step["clipped_ratio_fraction_low"] > 0 < scored.step["clipped_ratio_fraction_high"]
        check_against_oracle(scored, oracle)
