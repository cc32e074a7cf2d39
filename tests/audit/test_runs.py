"""The kept rollouts of a run of ours: clean as they are, and with faults in their rows."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from zlib_ng.zlib_ng import crc32

from audit.faults import KEPT, RowFault
from small_runs import kept_rows, read_lines, sampled_config, sort_prompts, word_model, write_lines
from truestep.commands.cli import main
from truestep.rollouts.kept.files import write_rows
from truestep.rollouts.kept.records import blocks_in, blocks_of, encode
from truestep.run.train import train
from truestep.tools.audit.formats.table import read_samples
from truestep.tools.audit.kept import join
from truestep.tools.audit.opening import UnreadableError, find_files
from truestep.tools.audit.run import audit
from truestep.tools.audit.samples import Sample
from truestep.types import Rollout


def make_run(folder: Path, steps: int, **kept: Any) -> Path:
    """Make a run of `steps` steps that keeps what `logging.rollouts` says."""
    prompts = write_lines(folder / "prompts.jsonl", sort_prompts(24))
    config = sampled_config(
        word_model(folder / "model"), prompts, folder / "run", schedule={"docs_per_step": 16, "steps": steps},
        sampler={"max_new_tokens": 12}, logging={"rollouts": kept},
    )  # fmt: skip
    train(config, Console(quiet=True))
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("audited"), 4, documents=16, with_tokens=16)


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    return kept_rows(run)


def test_a_run_of_ours_is_clean(run: Path) -> None:
    for named in (run, run / "rollouts"):
        result = audit([named])
        assert result.samples == 64
        assert result.labels > 200
        assert not result.findings


def rows_of_groups(rows: list[dict[str, Any]], with_tokens: int) -> list[dict[str, Any]]:
    """Rows of two groups of 8 for each of 40 steps, with right or wrong answers and the advantages of `grpo`. The first
    `with_tokens` rows of a step have the values of tokens."""
    draw, found = np.random.default_rng(0), list[dict[str, Any]]()
    for number in range(80):
        rewards = (draw.random(8) < 0.6).astype(float)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        step, group = 1 + number // 2, str(number)
        for member in range(8):
            place = number % 2 * 8 + member
            row = {**rows[place], "step": step, "group_id": group, "id": f"{group}-{member}", "prompt": group}
            row |= {"reward": rewards[member], "advantage": advantages[member], "completion": f"{group} {member}"}
            if place >= with_tokens:
                row |= dict.fromkeys(("token_texts", "token_logprobs", "token_log_ratios", "token_advantages"))
            found.append(row)
    return found


def groups_found(rows: list[dict[str, Any]], folder: Path) -> list[str]:
    return [one.name for one in audit([write_rows(folder, rows)]).findings if "advantages" in one.name]


def test_advantages_of_rows_without_tokens_are_compared(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """A run keeps the tokens of 4 documents a step by default, fewer than a group has."""
    kept = rows_of_groups(rows, with_tokens=4)
    assert not groups_found(kept, tmp_path / "clean")
    for row in kept[15::16]:
        row["advantage"] *= -1
    assert groups_found(kept, tmp_path / "turned") == ["advantages"]


def test_groups_of_which_an_advantage_is_unknown_are_left_out(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    kept = rows_of_groups(rows, with_tokens=16)
    for index, row in enumerate(kept):
        row["advantage"] = row["advantage"] if index % 16 < 4 else None
    assert not groups_found(kept, tmp_path)


@pytest.fixture(scope="module")
def whole_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps all records."""
    return make_run(tmp_path_factory.mktemp("records"), 3, documents="all")


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


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `run`, which keeps all records beside its rows."""
    return make_run(tmp_path_factory.mktemp("both"), 4, documents="all", with_tokens=16)


def planted(run: Path, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as a run's, and records of the same documents with the same values."""
    known = {one.id: one for block in blocks_of(run / "records") for one in block.read()}
    steps: dict[int, list[Rollout]] = {}
    for row in rows:
        one = known[row["id"]]
        sampler = np.subtract(row["token_logprobs"], row["token_log_ratios"])
        steps.setdefault(row["step"], []).append(
            replace(
                one,
                group_id=row["group_id"],
                reward=row["reward"],
                logprobs=at(one, sampler).astype(np.float32),
                advantages=at(one, row["advantage"]).astype(np.float32),
                model_version=at(one, row["model_version"]),
            )
        )
    (folder / "records").mkdir()
    content = [encode(step, documents) for step, documents in steps.items()]
    (folder / "records" / "from-00000001.records").write_bytes(b"".join(content))
    write_rows(folder / "rollouts", rows)
    shutil.copy(run / "ledger.jsonl", folder)
    return folder


def at(document: Rollout, values: Any) -> np.ndarray:
    whole = np.zeros(document.num_tokens, np.asarray(values).dtype)
    whole[document.loss_mask] = values
    return whole


@pytest.mark.parametrize("fault", KEPT, ids=lambda fault: fault.name)
def test_a_fault_in_rows_and_records_is_named(fault: RowFault, both: Path, tmp_path: Path) -> None:
    rows = kept_rows(both)
    rows = fault.change(rows) or rows
    result = audit([planted(both, tmp_path, rows)])
    assert result.samples == len(rows)
    assert [one.name for one in result.findings][:1] == [fault.finding]


def test_rows_and_records_are_one_sample(both: Path) -> None:
    """Each value is the record's or the row's, by the ids of the document."""
    result = audit([both])
    assert (result.samples, result.findings, result.lost) == (64, (), ())
    rows = {(row["step"], row["id"]): row for row in kept_rows(both)}
    documents: dict[Any, Rollout] = {
        (block.step, one.id): one for block in blocks_of(both / "records") for one in block.read()
    }
    samples = join(read_samples(find_files([both])))
    assert {(one.step, one.id) for one in samples} == rows.keys() == documents.keys() and len(samples) == 64
    for one in samples:
        row, document = rows[one.step, one.id], documents[one.step, one.id]
        assert one.ids is not None and one.mask is not None and one.trainer is not None and one.logprobs is not None
        assert one.ids.tolist() == document.input_ids.tolist() and one.mask.tolist() == document.loss_mask.tolist()
        assert document.logprobs is not None and np.array_equal(one.logprobs[one.mask], document.logprobs[one.mask])
        assert one.trainer[one.mask].tolist() == row["token_logprobs"] and np.isnan(one.trainer[~one.mask]).all()
        assert (one.staleness, one.mean_entropy) == (row["staleness"], row["entropy"])
        assert (one.prompt, one.completion) == (row["prompt"], row["completion"])
        assert one.file.endswith(".records")


def test_rows_and_records_without_a_partner_stand_alone(both: Path, tmp_path: Path) -> None:
    rows = [row for row in kept_rows(both) if row["step"] in (1, 2)]
    planted(both, tmp_path, rows)
    write_rows(tmp_path / "rollouts", [row for row in rows if row["step"] == 1][:8])
    (tmp_path / "rollouts" / "steps-00000001-00000002.parquet").unlink()
    write_rows(tmp_path / "rollouts", [row for row in kept_rows(both) if row["step"] == 3])
    samples = join(read_samples(find_files([tmp_path])))
    assert [one.step for one in samples] == [1] * 16 + [2] * 16 + [3] * 16
    assert [one.trainer is None for one in samples] == [False] * 8 + [True] * 24 + [False] * 16
    assert [one.file.endswith(".records") for one in samples] == [True] * 32 + [False] * 16


def test_a_row_is_split_over_the_sequences_of_its_document() -> None:
    def record(name: str, labels: int) -> Sample:
        mask = np.arange(5) >= 5 - labels
        return Sample("r/records/a.records", 1, name, np.arange(5), mask, step=1, document="d")

    row = Sample("r/rollouts/a.parquet", 1, "d", trainer=np.array([-1.0, -2, -3]), step=1, document="d", staleness=7)
    other = Sample("other/rollouts/a.parquet", 1, "d", trainer=np.array([-9.0]), step=1, document="d")
    first, second, third, alone = join([record("a", 2), record("b", 2), record("c", 1), row, other])
    nan = pytest.approx(np.nan, nan_ok=True)
    assert [one.trainer[3:].tolist() for one in (first, second) if one.trainer is not None] == [[-1, -2], [-3, nan]]
    assert third.trainer is None and {first.staleness, second.staleness, third.staleness} == {7} and alone is other
    cut = join([record("a", 1), row])
    assert cut[0].trainer is None and cut[0].misfits == (("token_logprobs", 3, 1),)


def test_lost_steps_are_said_and_are_no_finding(both: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(both, tmp_path / "run"))
    blocks = blocks_of(run / "records")
    content = blocks[0].file.read_bytes()
    for file in (run / "records").iterdir():
        file.unlink()
    shutil.rmtree(run / "rollouts")

    def write(step: int, part: bytes) -> Path:
        path = run / "records" / f"from-{step:08}.records"
        path.write_bytes(part)
        return path

    parts = [content[block.start : block.end] for block in blocks]
    cut = write(1, parts[0] + parts[1][:-9])
    write(3, b"")
    damaged = write(4, parts[3])
    result = audit([run])
    assert result.lost == (f"{run}: the records of 2 of 4 steps are lost: 2 to 3",)
    assert result.samples == 32 and result.clean
    typed = CliRunner().invoke(main, ["audit", str(run), "--output", str(tmp_path / "page.html")])
    assert typed.exit_code == 0 and "the records of 2 of 4 steps are lost: 2 to 3" in " ".join(typed.stdout.split())
    assert "the records of 2 of 4 steps are lost: 2 to 3." in (tmp_path / "page.html").read_text(encoding="utf-8")
    left = len(parts[1]) - 9
    assert audit([cut]).lost == audit([cut.parent]).lost == (f"{cut}: its last {left:,} bytes hold no whole step",)
    assert not audit([damaged]).lost
    damaged.write_bytes(b"RECS" + bytes(100))
    assert audit([run]).lost == (f"{run}: the records of 3 of 4 steps are lost: 2 to 4",)
    cut.unlink()  # the oldest files go where there are too many
    write(3, parts[2])
    assert audit([run]).lost == (f"{run}: the records of 1 of 2 steps are lost: 4",)
    shutil.rmtree(run / "records")
    (run / "records").mkdir()
    shutil.copytree(both / "rollouts", run / "rollouts")
    assert audit([run]).lost == (f"{run}: the records of 4 of 4 steps are lost: 1 to 4",)
    assert not audit([run]).findings


def test_steps_that_had_no_records_are_not_lost(both: Path, tmp_path: Path) -> None:
    """Those before `documents: all`, further updates on the same documents, and a line of what was put aside."""
    run = Path(shutil.copytree(both, tmp_path / "run"))
    lines = read_lines(run / "ledger.jsonl")
    del lines[0]["digests"]
    again = {**lines[3], "step": 5}
    aside = {"step": 5, "documents": [], "num_documents": 0}
    write_lines(run / "ledger.jsonl", [*lines, again, aside])
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "docum')
    assert not audit([run]).lost
    write_lines(run / "ledger.jsonl", [*lines, {**again, "documents": ["other"]}])
    assert audit([run]).lost == (f"{run}: the records of 1 of 4 steps are lost: 5",)


def test_a_record_that_claims_to_be_huge_is_not_decompressed(whole_records: Path, tmp_path: Path) -> None:
    file = copied(whole_records, tmp_path)
    block = next(blocks_in(file))
    head = json.dumps({"step": 1, "documents": [[size, 1 << 40, crc] for size, _, crc in block.sizes]}).encode()
    documents = file.read_bytes()[block.documents : block.end]
    file.write_bytes(b"RECS" + len(head).to_bytes(4, "little") + crc32(head).to_bytes(4, "little") + head + documents)
    with pytest.raises(UnreadableError, match="document 1 of step 1 is not read: it has more than 256 MiB"):
        audit([file])


def test_runs_are_audited_one_by_one(run: Path, whole_records: Path, tmp_path: Path) -> None:
    """Their steps and groups have the same names."""
    with pytest.raises(UnreadableError, match="several runs are named: audit each by itself"):
        audit([run, whole_records])
    assert audit([run, run.parent / "run"]).samples == 64
    shutil.copytree(run, tmp_path / "runs" / "a")
    with pytest.raises(UnreadableError, match=r"runs holds the directory of a run: name .*/runs/a"):
        audit([tmp_path / "runs"])
    shutil.copytree(run, tmp_path / "runs" / "b")
    with pytest.raises(UnreadableError, match=r"runs holds the directories of 2 runs: name one, such as .*/runs/a"):
        audit([tmp_path / "runs"])


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
