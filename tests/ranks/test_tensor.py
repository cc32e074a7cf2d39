"""One step over tensor ranks is the step of one process: loss, metrics, gradients and scores against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracles.step import LOSS_TYPES, oracle_step
from ranks.cases import on_ranks, score_all
from ranks.test_layouts import loss_of, make_case, options, read
from scoring import check_against_oracle

Model = Callable[[str], Path]


def tensor(ranks: int, **parallel: Any) -> tuple[dict[str, Any], int, int]:
    return {"tensor": ranks, **parallel}, 1, 40


@pytest.mark.parametrize(
    ("size", "kind"),
    [(2, "llama"), (2, "qwen2"), (2, "gemma2"), (2, "qwen3_tied"), (4, "llama"), (4, "gemma2"), (4, "qwen3_tied")],
)
def test_every_loss_is_the_oracles(size: int, kind: str, tiny_model: Model, tmp_path: Path) -> None:
    """Entropy and its bonus are among the metrics and losses; on four ranks there are fewer key heads than ranks."""
    runs, cases = [], []
    for name in LOSS_TYPES:
        loss = loss_of(name)
        model, rollouts, records = make_case(kind, loss, tiny_model, tmp_path)
        config = options(model, rollouts, loss, tensor(size))
        output = tmp_path / name
        runs.append((config, str(output)))
        cases.append((oracle_step(model, records, config), output))
    on_ranks(size, score_all, runs)
    for oracle, output in cases:
        check_against_oracle(read(output), oracle)
