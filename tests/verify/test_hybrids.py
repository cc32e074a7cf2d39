"""`verify` on models with recurrent layers and with sinks: no layout changes a step of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from families.tiny_families import tiny_family
from model.test_hybrids import FAMILIES, make_hybrid
from selection import in_tiers
from small_runs import file_config, write_rollouts
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

ALONE = {"one process", "smallest micro-batches", "shared prefixes"}
LAYOUTS = ALONE | {"FSDP 2", "context 2", "context 2, shared prefixes", "tensor 2", "pipeline 2"}
# What `verify` leaves out, because a run is refused: docs/families.md has the reasons.
REFUSED: dict[str, set[str]] = {
    "qwen3_5_text": set(),
    "nemotron_h": {"tensor 2"},
    "kimi_linear": {"tensor 2"},
    "qwen3_5_moe_text": {"tensor 2"},
    "granitemoehybrid": {"tensor 2"},
    "falcon_h1": {"tensor 2", "pipeline 2"},
    "lfm2": {"tensor 2"},
    "gpt_oss": {"tensor 2"},
    "deepseek_v3": set(),
}
# What states add to a layout is the same for all kinds of them, but where a document or a micro-batch is cut.
CUTS = {"smallest micro-batches", "shared prefixes", "context 2, shared prefixes"}
FEWER = {"nemotron_h": CUTS, "kimi_linear": CUTS, "deepseek_v3": {"one process", "smallest micro-batches"}}
WHOLE = [(kind, None) for kind in REFUSED]
ADAPTED = [(kind, {"rank": 3}) for kind in ("falcon_h1", "qwen3_5_text")]
LONG = [*WHOLE[:3], ADAPTED[0]]  # the kinds of recurrent layer, and an adapter beside two kinds in one layer


@pytest.mark.parametrize(("kind", "adapter"), in_tiers([*WHOLE, *ADAPTED], [], LONG))
def test_no_layout_changes_a_step(kind: str, adapter: dict[str, Any] | None, tmp_path: Path) -> None:
    (make_hybrid if kind in FAMILIES else tiny_family)(tmp_path / "model", kind)
    write_rollouts(tmp_path / "rollouts.jsonl", 20)
    config = file_config(tmp_path / "model", tmp_path / "rollouts.jsonl", tmp_path / "run", adapter=adapter)
    names = FEWER.get(kind, LAYOUTS)
    verdicts = verify(config, tmp_path / "out", most_ranks=2, only=lambda layout: layout.name in names)
    assert {verdict.layout.name for verdict in verdicts} == names - REFUSED[kind]
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]
