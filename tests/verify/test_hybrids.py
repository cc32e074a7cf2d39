"""`verify` on models with recurrent layers: no layout changes a step of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.test_hybrids import make_hybrid
from small_runs import file_config, write_rollouts
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

# What states add to a layout is the same for all kinds of them, but where a document or a micro-batch is cut.
CUTS = {"smallest micro-batches", "context 2"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("qwen3_5_text", {"one process", "FSDP 2", "pipeline 2", "tensor 2"}),
        ("nemotron_h", set()),
        ("kimi_linear", set()),
    ],
)
def test_no_layout_changes_a_step(kind: str, others: set[str], tmp_path: Path) -> None:
    make_hybrid(tmp_path / "model", kind)
    write_rollouts(tmp_path / "rollouts.jsonl", 20)
    config = file_config(tmp_path / "model", tmp_path / "rollouts.jsonl", tmp_path / "run")
    names = CUTS | others
    verdicts = verify(config, tmp_path / "out", most_ranks=2, only=lambda layout: layout.name in names)
    assert {verdict.layout.name for verdict in verdicts} == names
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]
