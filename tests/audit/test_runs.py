"""The kept rollouts of a run of ours: clean as they are, and with faults in their rows."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from zlib_ng.zlib_ng import crc32

from audit.faults import KEPT, RowFault
from small_runs import kept_rows, sampled_config, sort_prompts, word_model, write_lines
from truestep.rollouts.kept.files import write_rows
from truestep.rollouts.kept.records import blocks_in
from truestep.run.train import train
from truestep.tools.audit.opening import UnreadableError
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
    for named in (run, run / "rollouts"):
        result = audit([named])
        assert result.samples == 64
        assert result.labels > 200
        assert not result.findings


@pytest.fixture(scope="module")
def whole_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps all records."""
    folder = tmp_path_factory.mktemp("records")
    prompts = write_lines(folder / "prompts.jsonl", sort_prompts(24))
    config = sampled_config(
        word_model(folder / "model"), prompts, folder / "run", schedule={"docs_per_step": 16, "steps": 3},
        sampler={"max_new_tokens": 12}, logging={"rollouts": {"documents": "all"}},
    )  # fmt: skip
    train(config, Console(quiet=True))
    return folder / "run"


def test_whole_records_of_a_run_are_scored_by_its_first_weights(whole_records: Path) -> None:
    result = audit([whole_records], model=whole_records.parent / "model")
    assert result.samples == 48, "all documents of three steps, and not the 16 of each step that are shown"
    assert 16 < result.scored <= result.labels, "those of the first weights; the updates since are a cause"


@pytest.mark.parametrize("step", [1, 3])
def test_a_damaged_record_is_named(step: int, whole_records: Path, tmp_path: Path) -> None:
    file = copied(whole_records, tmp_path)
    block = list(blocks_in(file))[step - 1]
    content = bytearray(file.read_bytes())
    content[block.documents + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UnreadableError, match=f"the record of document 1 of step {step} is damaged"):
        audit([file])
    content[block.start] ^= 1
    file.write_bytes(content)
    if step == 3:  # what a kill leaves of a step is not read
        assert audit([file]).samples == 32
        return
    with pytest.raises(UnreadableError, match=rf"its bytes {block.start:,} to {block.end:,} are damaged"):
        audit([file])


def test_a_record_that_claims_to_be_huge_is_not_decompressed(whole_records: Path, tmp_path: Path) -> None:
    file = copied(whole_records, tmp_path)
    block = next(blocks_in(file))
    head = json.dumps({"step": 1, "documents": [[size, 1 << 40, crc] for size, _, crc in block.sizes]}).encode()
    documents = file.read_bytes()[block.documents : block.end]
    file.write_bytes(b"RECS" + len(head).to_bytes(4, "little") + crc32(head).to_bytes(4, "little") + head + documents)
    with pytest.raises(UnreadableError, match="a document of step 1 is not read: it has more than 1024 MiB"):
        audit([file])


def test_a_run_that_kept_nothing_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes((run / "ledger.jsonl").read_bytes())
    with pytest.raises(UnreadableError, match=r"has kept no rollouts: logging\.rollouts says which"):
        audit([tmp_path])


def copied(run: Path, folder: Path) -> Path:
    (file,) = (run / "records").iterdir()
    return Path(shutil.copy(file, folder))


@pytest.mark.parametrize("fault", KEPT, ids=lambda fault: fault.name)
def test_a_fault_in_kept_rollouts_is_named(fault: RowFault, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    changed = copy.deepcopy(rows)
    changed = fault.change(changed) or changed
    result = audit([write_rows(tmp_path, changed)])
    assert [one.name for one in result.findings][:1] == [fault.finding]
