"""Recomputation in part, with activations on the host, over ranks: every layout's step is the float64 one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracles.step import oracle_step
from ranks.cases import on_ranks, score_all
from ranks.test_layouts import make_case, options, read
from scoring import check_against_oracle

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "shards 2": (2, {}),
    "context 2": (2, {"context": 2}),
    "tensor 2 x shards 2": (4, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
}
SHORT = "shards 2"


@pytest.mark.parametrize(
    "name", [SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS if name != SHORT)]
)
def test_a_step_with_recomputation_in_part(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    size, parallel = LAYOUTS[name]
    loss = {"type": "grpo", "metrics": "full"}
    model, rollouts, records = make_case("qwen3", loss, tiny_model, tmp_path)
    plain = options(model, rollouts, loss, (parallel, 1, 64))
    outputs = []
    for how in ("elementwise", "selective", "full"):
        given: dict[str, Any] = {"activation_checkpointing": how, "activation_offload": True}
        outputs.append((plain | {"model": {**plain["model"], **given}}, str(tmp_path / how)))
    on_ranks(size, score_all, outputs)
    oracle = oracle_step(model, records, plain)
    for _, output in outputs:
        check_against_oracle(read(Path(output)), oracle)
