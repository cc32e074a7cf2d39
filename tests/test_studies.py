"""What benchmarks/studies.py keeps of runs, and what it says of them. The runs themselves are no test's matter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT

before = sys.path
sys.path = [*before, str(ROOT / "benchmarks")]
try:
    import replay_study
    import studies
finally:
    sys.path = before


def line(**changes: Any) -> dict[str, Any]:
    whole = {"replay": "auto", "staleness": 2, "sampler": "bfloat16", "seed": 0, "ended": "steps", "seconds": 1.0}
    accuracy = {"before": 0.25, "final": 0.9, "best": 0.95, "steps_to_90": 80}
    return whole | accuracy | {"kl": 0.001, "outside": 0.02, "other_routes": 0.03} | changes


@pytest.mark.parametrize(
    ("changes", "fell"),
    [
        ({}, False),
        ({"final": 0.84}, True),
        ({"final": 0.2, "best": 0.25}, True),
        ({"ended": "FloatingPointError: grad_norm"}, True),
        ({"ended": "RuntimeError: early", "before": None, "final": None, "best": None}, True),
    ],
)
def test_a_run_survives_or_collapses(changes: dict[str, Any], fell: bool) -> None:
    assert studies.collapsed(line(**changes)) == fell


def test_a_run_that_fails_before_it_trains_is_a_line_and_is_made_again(tmp_path: Path) -> None:
    def fails(folder: Path, *cell: Any) -> dict[str, Any]:
        raise RuntimeError("no model")

    cell = ("auto", 2, "bfloat16", 0)
    failed = studies._run_before(float("inf"), fails, replay_study.STUDY.fields, tmp_path, cell)
    assert failed is not None and failed["ended"] == "not made: RuntimeError: no model"
    assert replay_study.STUDY.cell_of(failed) == cell
    assert studies._run_before(0.0, fails, replay_study.STUDY.fields, tmp_path, cell) is None, "it is too late"
    file = tmp_path / "study.jsonl"
    assert replay_study.STUDY.read(file) == []
    lines = [failed, line(final=0.5), line(), line(seed=1), {**failed, "seed": 1}]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    assert replay_study.STUDY.read(file) == [line(), line(seed=1)]


def test_the_table_has_the_survivors_of_each_cell() -> None:
    lines = [line(), line(seed=1, final=0.8), line(replay="off", final=None, before=None, ended="E: x", kl=None)]
    rows = [row for row in replay_study.table(lines).splitlines() if row.startswith("| bfloat16")]
    assert rows == [
        "| bfloat16 | auto |  | 1 of 2: 85 (80–90) @80 ↓1 |  |",
        "| bfloat16 | off |  | 0 of 1: – @80 ↓1 |  |",
        "| bfloat16 | auto |  | 1.0e-03, 2.00%, 3.0% |  |",
        "| bfloat16 | off |  |  |  |",
    ]


def test_the_study_has_sixty_runs() -> None:
    found = list(replay_study.cells(replay_study.SEEDS))
    assert len(set(found)) == len(found) == 60
