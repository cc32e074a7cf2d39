"""The tables that TRL's own trainer writes: clean as they are, and with faults in their rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from audit.faults import TRL_TABLES, RowFault
from peers.installed import needs_peers, run_worker
from small_runs import tokenised_model
from truestep.tools.audit.run import audit

pytestmark = [pytest.mark.nightly, needs_peers]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    model = tokenised_model(folder / "model", "qwen3")
    prompts = [f"w{one} w{two} w{one + two}" for one in range(6) for two in range(6)]
    run_worker(
        "trl_completions_worker.py", {"model": str(model), "prompts": prompts, "output": str(folder / "out")}, folder
    )
    return folder / "out" / "completions"


@pytest.fixture(scope="module")
def rows(tables: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(tables.glob("*.parquet")) for row in parquet.read_table(file).to_pylist()]


@pytest.mark.parametrize("source", ["auto", "trl"])
def test_a_run_of_trl_is_clean(source: str, tables: Path) -> None:
    result = audit([tables], source=source)
    assert result.samples == 48
    assert not result.findings


@pytest.mark.parametrize("fault", TRL_TABLES, ids=lambda fault: fault.name)
def test_a_fault_in_a_table_of_trl_is_named(fault: RowFault, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    changed = copy.deepcopy(rows)
    changed = fault.change(changed) or changed
    parquet.write_table(arrow.Table.from_pylist(changed), tmp_path / "completions_00001.parquet")
    result = audit([tmp_path])
    assert [one.name for one in result.findings][:1] == [fault.finding]
