"""The kept rollouts of a run of ours: clean as they are, and with faults in their rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audit.faults import KEPT, RowFault
from small_runs import kept_rows, sampled_config, sort_prompts, word_model, write_lines
from truestep.rollouts.kept.files import write_rows
from truestep.run.train import train
from truestep.tools.audit.run import audit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audited")
    prompts = write_lines(folder / "prompts.jsonl", sort_prompts(24))
    schedule = {"docs_per_step": 16, "steps": 4}
    config = sampled_config(
        word_model(folder / "model"), prompts, folder / "run", schedule=schedule, sampler={"max_new_tokens": 12},
        logging={"rollouts": {"documents": 16, "with_tokens": 16}},
    )  # fmt: skip
    train(config, Console(quiet=True))
    return folder / "run"


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    return kept_rows(run)


def test_a_run_of_ours_is_clean(run: Path) -> None:
    result = audit([run / "rollouts"])
    assert result.samples == 64
    assert result.labels > 200
    assert not result.findings


@pytest.mark.parametrize("fault", KEPT, ids=lambda fault: fault.name)
def test_a_fault_in_kept_rollouts_is_named(fault: RowFault, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    changed = copy.deepcopy(rows)
    changed = fault.change(changed) or changed
    result = audit([write_rows(tmp_path, changed)])
    assert [one.name for one in result.findings][:1] == [fault.finding]
